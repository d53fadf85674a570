"""The command line's own matters: options, standard output, files of results, and how a command ends."""
