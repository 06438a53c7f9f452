"""Which kernel: the device, the table, what was measured on this machine, and who reads packed keys."""
