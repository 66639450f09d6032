"""The main job, shown: `python -m demo`, or `make demo`.

Needs the packages of the test environment; imports the plugin nowhere: it is used as a user would
use it, by its flags.
"""
