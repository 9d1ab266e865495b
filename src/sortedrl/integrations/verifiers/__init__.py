"""Environments of the verifiers package (0.4) as a task: `sortedrl train --task verifiers:TASKSET`.

    task.py          the taskset's tasks as problems, and their prompts
    renderer.py      messages to tokens, with the tokens of earlier turns kept
    env_server.py    processes in which verifiers runs the episodes
    episode.py       one episode: answers its requests with the rollout's turns, takes its observations; and the HTTP
                     endpoint that the model client posts these requests to
    service.py       all of these in one thread
    environments.py  the scheduler's view (core/turns.py)

verifiers drives an episode itself and calls a model whenever it needs a turn. Here the scheduler drives the rollout.
Both fit because the request of a turn is held: it arrives with the observation in its prompt, waits while the scheduler
decodes the turn, across weight updates if need be, and is answered with the turn's tokens.
"""
