"""A server of A that processes join by its address, each with a loop of its own, and leave when they like.

::

    paceline.serve    thread: listens, ServerRun with A and the optimizer     main: watches, Ctrl-C, callbacks, the Run
    paceline.join     thread: connects, joins, run_replica                    main: the script's own loop

Membership is that of every server whose replicas come and go (:mod:`paceline.engine.server`); a connection is a
replica's process, and its end is the replica's, whatever the reason.
"""
