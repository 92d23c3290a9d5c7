"""`Apart`: one twin per group of devices, and what they send each other."""
