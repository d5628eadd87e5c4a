"""Looking rows up, one file a way of doing it. Importing this package imports no torch; its modules may."""
