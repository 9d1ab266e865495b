"""An engine in this process with a model of its own, by import path: `own_engine:on_cpu`. Its weights come later."""

import transformers

from sortedrl.core.engine import EngineSpec
from sortedrl.engines.embedded.engine import EmbeddedEngine


def on_cpu(spec: EngineSpec) -> EmbeddedEngine:
    config = transformers.AutoConfig.from_pretrained(spec.model)
    model = getattr(transformers, config.architectures[0])(config).float()  # from_pretrained would shard it with ZeRO-3
    return EmbeddedEngine(
        model, slots=spec.slots, eos_token_ids=spec.eos_token_ids, max_length=spec.max_length, tokenizer=spec.tokenizer
    )
