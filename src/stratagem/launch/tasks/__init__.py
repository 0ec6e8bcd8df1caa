"""One running task: its process, exit status, output and function call."""
