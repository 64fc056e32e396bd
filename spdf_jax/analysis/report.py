def write_report(): pass
