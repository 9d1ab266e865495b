"""SortedRL inside verl: a trainer mode of verl's V1 trainer, `trainer.v1.trainer_mode=sortedrl`.

verl still provides resource pools, training engines, rollout servers, weight sync, rewards, checkpoints and trackers.
The scheduler decides which prompts to load, which rollouts to start and in which order, when to harvest, what to keep,
and which rollouts form an update. It is `core.Controller`, unchanged: the interface is the engine protocol.

    core.Controller                                  in verl's TaskRunner process, in a thread of its own (pump.Pump)
       |  submit / poll / abort / weights  ^  scores, turns
    engine.VerlEngine + scores, turns      |
       |  rows of the dataset              |  reports
    agent.SortedAgentLoopManager        exchange.Exchange        a Ray actor; also the gate: who has a slot
       |                                   ^
    agent.SortedAgentLoopWorker -----------+         Ray actors, on all nodes
       |  any agent loop of verl or of the user      worker_loop.WorkerLoop: what it has sampled so far
    client.SortedClient --> verl's load balancer --> vLLM or SGLang servers

One rollout is one run of an agent loop, and one call of `generate` is one turn. The client waits at the gate for a slot
before each turn. When the turn ends, the slot is free: tools run without one. `abort` makes the servers abort; the
client reports the generated tokens and waits at the gate, inside `generate`, with the agent loop's state untouched. The
next `submit` of the rollout opens the gate for it. Modes that drop the tokens cancel the agent loop and start another.
The buffer has all tokens, so a checkpoint keeps a first turn and a new agent loop continues it; later turns need
the state of their agent loop, which dies with the run: they are regenerated. Finished trajectories go into the
TransferQueue like all verl trajectories, and the batch that the trainer samples is a list of their keys.

Why this interface: it needs only what verl's own trainers use (the trainer's hooks, the agent loop manager's class, a
client class, abort and resume of replicas, TransferQueue keys), and no change to the scheduler. A custom sampler alone
could only choose among finished prompts: it can neither order the starts nor regenerate aborted rollouts.

Two layouts: servers on the learner's GPUs, or on GPUs of their own, where partial modes generate while the learner
steps.

`plugin` registers the mode when verl is imported (entry point `verl.plugins`); nothing here imports verl before that.
"""
