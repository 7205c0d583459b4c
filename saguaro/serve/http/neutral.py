"""Unsupported parameters of the OpenAI API and of vLLM, and the values that are accepted for them."""

from typing import Any

# Values without effect; null is always accepted.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none",),
    "suffix": ("",),
    "best_of": (1,),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "store": (False,),
    "service_tier": ("auto", "default", "standard_only"),
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "max_tool_calls": (),
    "top_logprobs": (0,),
    "container": (),
    "context_management": (),
    "mcp_servers": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True, False),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "priority": (0,),
    "logits_processors": ([],),
    "return_tokens_as_token_ids": (False,),
    "request_id": (),
    "cache_salt": (),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "prompt_embeds": (),
    "include_reasoning": (True,),
}

# Identification and storage: without effect on the output.
IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "cache_control")
