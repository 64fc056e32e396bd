"""The modeled wafer: what a program would take on a CS-2 or CS-3."""
