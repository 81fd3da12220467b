"""Runs the commands on input that chance has damaged, and says where they do not do what SECURITY.md promises."""
