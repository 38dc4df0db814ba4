"""Optional parts for starter.py: more speed, several GPUs, guards around a run. Same numbers."""
