"""The KL penalty of starter.py inside other trainers: TRL and Tinker."""
