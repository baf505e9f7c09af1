"""The loop from arrival to engine over arrays, for numba.

``cluster.py`` drives the gateway's ``Scheduler``, and is the reference: what is here has the same
records, to the last bit, in the cases that ``cases.covered`` knows; all others are not run here.
Every function is plain code on numbers and arrays, which also runs as it is written, slowly.

    cases     which simulations are covered, and what they are made of
    jit       compiling, and a key for what numba keeps on disk
    tables    requests, engines and instances as arrays; what engines have logged
    lengths   the predictors
    loads     sums of charges, exactly
    placing   policies that place a request as it comes
    progress  what is on the instances, for finish-time, and how fast they are
    late_binding  finish-time: its queue and its choice
"""
