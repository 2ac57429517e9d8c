"""Modules that install a device, which must not be imported into pytest's own process to look for doctests."""

collect_ignore = ["cpp_device.py", "local_cases.py", "process_group.py", "python_device.py"]
