"""SortedRL inside verl: a trainer mode of verl's V1 trainer, `trainer.v1.trainer_mode=sortedrl`.

verl keeps what it is good at: resource pools, training engines, rollout servers, weight sync, rewards, checkpoints,
trackers. The scheduler decides what is loaded, what is started and in which order, when to harvest, what is kept and
what an update is made of. It is `core.Controller`, unchanged: the seam is the engine protocol.

    core.Controller                                  in verl's TaskRunner process
       |  submit / poll / stop / load      ^  scores
    engine.VerlEngine + engine.VerlScores  |
       |  rows of the dataset              |  what happened
    agent.SortedAgentLoopManager        exchange.Exchange        a Ray actor
       |                                   ^
    agent.SortedAgentLoopWorker -----------+         Ray actors, on all nodes
       |  any agent loop of verl or of the user
    agent.SortedClient --> verl's load balancer --> vLLM or SGLang servers

One rollout is one run of an agent loop. `submit` hands it to an agent loop worker, with the tokens that it has already;
the client adds these to the prompt and asks for what is left of the budget. `stop` has the servers abort; the client
hands over the tokens that were made, and the agent loop ends. So nothing of a stopped rollout is left in a worker: the
buffer holds its tokens, on-policy mode drops them there, and a checkpoint keeps them. Finished trajectories go the way
of all verl trajectories, into the TransferQueue, and the batch that the trainer samples is a list of their keys.

Why this seam: it asks of verl only what its own trainers use (the trainer's hooks, the agent loop manager's class, a
client class, abort and resume of replicas, TransferQueue keys), and of the scheduler nothing. A custom sampler alone
could only choose among finished prompts: it cannot order what starts, nor regenerate what was stopped.

`plugin` registers the mode when verl is imported (entry point `verl.plugins`); nothing here imports verl before that.
"""
