"""The engine: one decoding step as a pure function, and the host's side around it.

step        the engine's state, one step, and a run of many
counters    what happened since the state was made
requests    requests, checked and laid out as rows
dispatch    the programs, and the updates in their reports
report      what the host learns of a dispatch
mailbox     updates of a request, until they are taken
registry    requests by where they are, and the rows that they have
exclusive   one thread at a time
intake      requests from their arrival to their last update
roots       what the cached contents of a salt begin with
engine      what serves them: dispatches, one after another
integrity   the public checker of a cache or an engine
"""
