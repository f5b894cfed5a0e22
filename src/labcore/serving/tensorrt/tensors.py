"""Names, types and shapes of the tensors that TensorRT-LLM's Triton models take and give.

A line of a table is `TYPE dims flags: names`; dims are without the batch; `scalar` is a tensor
of one number that reaches the model without its dimension, `ragged` rows of unequal length,
`LOGITS` the type of the logits. This is the part for text; tensors for images, LoRA and prompt
tables are left out, but for those that the models read in any case. Names and types after
https://github.com/NVIDIA/TensorRT-LLM, triton_backend/all_models, of 2025 and 2026.
"""

from __future__ import annotations

from typing import Any

from labcore.serving.triton.pbtxt import Word

__all__ = [
    "BLS",
    "ENGINE",
    "ENSEMBLE",
    "LLMAPI",
    "POSTPROCESSING",
    "PREPROCESSING",
    "STEPS",
    "tensors",
]

_METRICS = """
INT32 1: kv_cache_alloc_new_blocks kv_cache_reused_blocks kv_cache_alloc_total_blocks
INT64 1: arrival_time_ns first_scheduled_time_ns first_token_time_ns last_token_time_ns
FP32 1: acceptance_rate
INT32 1: total_accepted_draft_tokens total_draft_tokens num_input_tokens num_output_tokens
"""

_LOGITS = """
FP32 -1: cum_log_probs
FP32 -1,-1: output_log_probs
LOGITS -1,-1: context_logits
LOGITS -1,-1,-1: generation_logits
INT32 1: batch_index sequence_index
"""

ENGINE = (
    """
INT32 -1 ragged optional: input_ids
INT32 1 scalar: input_lengths request_output_len
INT32 1 scalar optional: num_return_sequences
INT32 -1 ragged optional: draft_input_ids decoder_input_ids
INT32 1 scalar optional: decoder_input_lengths
LOGITS -1,-1 ragged optional: draft_logits
FP32 1 scalar optional: draft_acceptance_threshold
INT32 1 scalar optional: end_id pad_id
INT32 2,-1 ragged optional: stop_words_list bad_words_list
FP32 -1 ragged optional: embedding_bias
INT32 1 scalar optional: beam_width
FP32 1 scalar optional: temperature
INT32 1 scalar optional: runtime_top_k
FP32 1 scalar optional: runtime_top_p runtime_top_p_min runtime_top_p_decay
INT32 1 scalar optional: runtime_top_p_reset_ids
FP32 1 scalar optional: len_penalty
BOOL 1 scalar optional: early_stopping
FP32 1 scalar optional: repetition_penalty
INT32 1 scalar optional: min_tokens
FP32 1 scalar optional: beam_search_diversity_rate presence_penalty frequency_penalty
UINT64 1 scalar optional: seed
BOOL 1 scalar optional: return_log_probs return_context_logits return_generation_logits
BOOL 1 scalar optional: return_perf_metrics return_num_input_tokens return_num_output_tokens
BOOL 1 scalar optional: exclude_input_in_output stop streaming
UINT64 -1 ragged optional: prompt_table_extra_ids
STRING 1 ragged optional: guided_decoding_guide_type guided_decoding_guide
""",
    """
INT32 -1,-1: output_ids
INT32 -1: sequence_length
"""
    + _LOGITS
    + _METRICS,
)

PREPROCESSING = (
    """
STRING 1: QUERY
STRING 1 optional: DECODER_QUERY
INT32 1: REQUEST_OUTPUT_LEN
STRING -1 optional: BAD_WORDS_DICT STOP_WORDS_DICT EMBEDDING_BIAS_WORDS
FP32 -1 optional: EMBEDDING_BIAS_WEIGHTS
INT32 1 optional: END_ID PAD_ID
UINT64 1 optional: PROMPT_TABLE_EXTRA_ID
""",
    """
INT32 -1: INPUT_ID
INT32 1: REQUEST_INPUT_LEN
INT32 -1: DECODER_INPUT_ID
INT32 1: REQUEST_DECODER_INPUT_LEN
INT32 2,-1: BAD_WORDS_IDS STOP_WORDS_IDS
FP32 -1: EMBEDDING_BIAS
INT32 -1: REQUEST_OUTPUT_LEN
INT32 1: OUT_END_ID OUT_PAD_ID
UINT64 -1: OUT_PROMPT_TABLE_EXTRA_IDS
FP16 -1,-1,-1,-1: PIXEL_VALUES
INT64 -1,2: IMAGE_SIZES
BOOL 1: IS_VIDEO_INPUT
INT64 -1: ATTENTION_MASK
INT64 3: IMAGE_GRID_THW
INT32 -1: VISION_INPUT_ID
""",
)

POSTPROCESSING = (
    """
INT32 -1,-1: TOKENS_BATCH
INT32 -1: SEQUENCE_LENGTH
""",
    "STRING -1: OUTPUT",
)

# {flag} is `scalar` for the BLS model, whose requests go to the engine as they are.
_TEXT = """
STRING 1: text_input
STRING 1 optional: decoder_text_input
INT32 1: max_tokens
INT32 1 {flag} optional: num_return_sequences
STRING -1 optional: bad_words stop_words
BOOL 1 optional: exclude_input_in_output
INT32 1 optional: end_id pad_id top_k
FP32 1 optional: top_p temperature length_penalty repetition_penalty
INT32 1 optional: min_tokens
FP32 1 optional: presence_penalty frequency_penalty
UINT64 1 optional: seed
BOOL 1 {flag} optional: return_log_probs return_context_logits return_generation_logits
BOOL 1 {flag} optional: return_perf_metrics return_num_input_tokens return_num_output_tokens
INT32 1 optional: beam_width
BOOL 1 optional: stream
UINT64 1 optional: prompt_table_extra_id
STRING -1 optional: embedding_bias_words
FP32 -1 optional: embedding_bias_weights
STRING 1 optional: guided_decoding_guide_type guided_decoding_guide
"""

_TEXT_OUTPUTS = "STRING -1: text_output" + _LOGITS + _METRICS

ENSEMBLE = (_TEXT.replace("{flag} ", ""), _TEXT_OUTPUTS)

BLS = (
    _TEXT.replace("{flag}", "scalar")
    + "INT32 1 optional: num_draft_tokens\nBOOL 1 scalar optional: use_draft_logits\n",
    _TEXT_OUTPUTS,
)

LLMAPI = (
    """
STRING -1: text_input
BOOL 1 optional: streaming
INT32 1 optional: sampling_param_best_of
FP32 1 optional: sampling_param_temperature
INT32 1 optional: sampling_param_top_k
FP32 1 optional: sampling_param_top_p sampling_param_frequency_penalty
FP32 1 optional: sampling_param_presence_penalty
INT32 1 optional: sampling_param_max_tokens
STRING -1 optional: sampling_param_stop
UINT64 1 optional: sampling_param_seed
BOOL 1 optional: sampling_param_exclude_input_from_output sampling_param_return_perf_metrics
BOOL 1 optional: return_finish_reason return_stop_reason return_cumulative_logprob stop
""",
    """
STRING -1: text_output finish_reason stop_reason
FP32 -1: cumulative_logprob
INT32 -1: kv_cache_reused_block kv_cache_missed_block
INT32 -1: kv_cache_alloc_new_blocks kv_cache_alloc_total_blocks
FP32 -1: kv_cache_hit_rate
INT64 1: arrival_time_ns first_scheduled_time_ns first_token_time_ns last_token_time_ns
FP32 1: acceptance_rate
INT32 1: total_accepted_draft_tokens total_draft_tokens
""",
)

# The steps of the ensemble: tensor of the model = tensor of the ensemble. `_` begins those that
# only pass between steps.
STEPS: dict[str, tuple[str, str]] = {
    "preprocessing": (
        "QUERY=text_input DECODER_QUERY=decoder_text_input REQUEST_OUTPUT_LEN=max_tokens "
        "BAD_WORDS_DICT=bad_words STOP_WORDS_DICT=stop_words END_ID=end_id PAD_ID=pad_id "
        "EMBEDDING_BIAS_WORDS=embedding_bias_words EMBEDDING_BIAS_WEIGHTS=embedding_bias_weights "
        "PROMPT_TABLE_EXTRA_ID=prompt_table_extra_id",
        "INPUT_ID=_INPUT_ID REQUEST_INPUT_LEN=_REQUEST_INPUT_LEN "
        "DECODER_INPUT_ID=_DECODER_INPUT_ID "
        "REQUEST_DECODER_INPUT_LEN=_REQUEST_DECODER_INPUT_LEN STOP_WORDS_IDS=_STOP_WORDS_IDS "
        "REQUEST_OUTPUT_LEN=_REQUEST_OUTPUT_LEN BAD_WORDS_IDS=_BAD_WORDS_IDS "
        "EMBEDDING_BIAS=_EMBEDDING_BIAS OUT_END_ID=_PREPROCESSOR_END_ID "
        "OUT_PAD_ID=_PREPROCESSOR_PAD_ID OUT_PROMPT_TABLE_EXTRA_IDS=_OUT_PROMPT_TABLE_EXTRA_IDS",
    ),
    "tensorrt_llm": (
        "input_ids=_INPUT_ID input_lengths=_REQUEST_INPUT_LEN decoder_input_ids=_DECODER_INPUT_ID "
        "decoder_input_lengths=_REQUEST_DECODER_INPUT_LEN request_output_len=_REQUEST_OUTPUT_LEN "
        "end_id=_PREPROCESSOR_END_ID pad_id=_PREPROCESSOR_PAD_ID embedding_bias=_EMBEDDING_BIAS "
        "stop_words_list=_STOP_WORDS_IDS bad_words_list=_BAD_WORDS_IDS runtime_top_k=top_k "
        "prompt_table_extra_ids=_OUT_PROMPT_TABLE_EXTRA_IDS runtime_top_p=top_p streaming=stream "
        "len_penalty=length_penalty exclude_input_in_output temperature repetition_penalty "
        "min_tokens presence_penalty frequency_penalty seed return_log_probs beam_width "
        "return_context_logits return_generation_logits return_perf_metrics "
        "return_num_input_tokens return_num_output_tokens num_return_sequences "
        "guided_decoding_guide_type guided_decoding_guide",
        "output_ids=_TOKENS_BATCH sequence_length=_SEQUENCE_LENGTH cum_log_probs output_log_probs "
        "context_logits generation_logits batch_index sequence_index kv_cache_alloc_new_blocks "
        "kv_cache_reused_blocks kv_cache_alloc_total_blocks arrival_time_ns "
        "first_scheduled_time_ns first_token_time_ns last_token_time_ns acceptance_rate "
        "total_accepted_draft_tokens total_draft_tokens num_input_tokens num_output_tokens",
    ),
    "postprocessing": (
        "TOKENS_BATCH=_TOKENS_BATCH SEQUENCE_LENGTH=_SEQUENCE_LENGTH",
        "OUTPUT=text_output",
    ),
}


def tensors(table: str, logits: str = "TYPE_FP32") -> list[dict[str, Any]]:
    """The tensors of a table, as fields of `input` or `output` in a model configuration."""
    found: list[dict[str, Any]] = []
    for line in filter(None, map(str.strip, table.splitlines())):
        head, _, names = line.partition(": ")
        kind, dims, *flags = head.split()
        for name in names.split():
            one: dict[str, Any] = {
                "name": name,
                "data_type": Word(logits if kind == "LOGITS" else f"TYPE_{kind}"),
                "dims": [int(size) for size in dims.split(",")],
            }
            if "scalar" in flags:
                one["reshape"] = {"shape": []}
            if "optional" in flags:
                one["optional"] = True
            if "ragged" in flags:
                one["allow_ragged_batch"] = True
            found.append(one)
    return found
