"""One file for each kind of data file; a reader yields records and holds one piece of a file in memory."""
