"""The loop from arrival to engine over arrays, for numba.

``cluster.py`` drives the gateway's ``Scheduler``, and is the reference: this code gives the same
records, to the last bit, in the cases that ``cases.covered`` knows; it runs no others.
Every function is plain code on numbers and arrays, which also runs as it is written, slowly.
"""
