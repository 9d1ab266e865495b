"""SortedRL inside verl: a trainer mode of verl's V1 trainer, `trainer.v1.trainer_mode=sortedrl`.

verl still provides resource pools, training engines, rollout servers, weight sync, rewards, checkpoints and trackers.
The scheduler decides which prompts to load, which rollouts to start and in which order, when to harvest, what to keep,
and which rollouts form an update. It is `core.Controller`, unchanged: the interface is the engine protocol.

    core.Controller                                  in verl's TaskRunner process
       |  submit / poll / abort / weights  ^  scores
    engine.VerlEngine + engine.VerlScores  |
       |  rows of the dataset              |  reports
    agent.SortedAgentLoopManager        exchange.Exchange        a Ray actor
       |                                   ^
    agent.SortedAgentLoopWorker -----------+         Ray actors, on all nodes
       |  any agent loop of verl or of the user
    agent.SortedClient --> verl's load balancer --> vLLM or SGLang servers

One rollout is one run of an agent loop. `submit` sends it to an agent loop worker, with its prefix; the client appends
the prefix to the prompt and requests the remaining tokens. `abort` makes the servers abort; the client reports the
generated tokens, and the agent loop ends. So a worker keeps nothing of an aborted rollout: the buffer holds its tokens,
on-policy mode drops them there, and a checkpoint keeps them. Finished trajectories go into the TransferQueue like all
verl trajectories, and the batch that the trainer samples is a list of their keys.

Why this interface: it needs only what verl's own trainers use (the trainer's hooks, the agent loop manager's class, a
client class, abort and resume of replicas, TransferQueue keys), and no change to the scheduler. A custom sampler alone
could only choose among finished prompts: it can neither order the starts nor regenerate aborted rollouts.

`plugin` registers the mode when verl is imported (entry point `verl.plugins`); nothing here imports verl before that.
"""
