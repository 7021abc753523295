"""From what the user types to a path on this machine. Belongs here: aliases, the model hub, its cache on disk.
Never: what the files mean beyond "can this be loaded", which weights/ answers.
"""
