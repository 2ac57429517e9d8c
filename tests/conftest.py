"""Scripts that tests start as processes are no modules of tests."""

collect_ignore_glob = ["*_script.py"]
