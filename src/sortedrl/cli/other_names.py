"""Names that vLLM, SGLang, TRL and verl users know for a setting of ours, to name ours in the error."""

from __future__ import annotations

from collections.abc import Container

SETTINGS = {
    "slots": ("max_num_seqs", "max_running_requests"),
    "rollouts_per_prompt": ("num_generations", "group_size"),
    "rollouts_per_update": ("train_batch_size", "batch_size", "generation_batch_size", "per_device_train_batch_size"),
    "max_response_tokens": ("max_completion_length", "max_response_length", "max_new_tokens", "max_tokens"),
    "max_prompt_tokens": ("max_prompt_length",),
    "max_context_tokens": ("max_model_len", "max_length", "context_length"),
    "model": ("model_name_or_path", "model_path"),
    "data": ("dataset", "dataset_name", "train_files"),
    "updates": ("max_steps", "steps", "total_training_steps"),
    "epochs": ("num_train_epochs", "total_epochs"),
    "learning_rate": ("lr",),
    "lora_rank": ("lora_r",),
    "clip_low": ("epsilon", "clip_ratio_low"),
    "clip_high": ("epsilon_high", "clip_ratio_high"),
    "ratio_level": ("importance_sampling_level",),
    "importance_cap": ("vllm_importance_sampling_cap",),
    "aggregation": ("loss_type", "loss_agg_mode"),
    "truncated_rollouts": ("mask_truncated_completions",),
    "kl_coefficient": ("beta", "kl_loss_coef"),
    "entropy_coefficient": ("entropy_coeff",),
    "max_grad_norm": ("grad_clip",),
    "warmup_updates": ("warmup_steps", "lr_warmup_steps"),
    "gae_lambda": ("lam",),
    "eval_every": ("eval_steps", "test_freq"),
    "checkpoint_every": ("save_steps", "save_freq"),
    "tracker": ("report_to",),
    "out": ("output_dir",),
    "resume": ("resume_from_checkpoint",),
}


def our_name_for(key: str, known_keys: Container[str]) -> str | None:
    """The setting of a command with these settings that another tool calls `key`."""
    return next((ours for ours, theirs in SETTINGS.items() if key in theirs and ours in known_keys), None)
