"""Processes on this machine, and what the commands that start them share."""
