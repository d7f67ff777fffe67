"""The `kvbench` command: what the store reaches on this machine, content checked, beside what the machine allows."""
