"""Operations, the command line, the dashboard: everything that people use to see and steer a system."""
