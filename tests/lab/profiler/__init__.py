"""A package only so that the tests beside each other share ``builders``."""
