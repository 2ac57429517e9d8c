"""Where A lives: engines that carry any replica under any policy."""
