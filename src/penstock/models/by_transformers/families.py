"""Families that transformers' code runs here: those that were tried, and why others are not run.

`python -m tests.models.sweep` tries them, and prints what is missing here of the transformers that is installed."""


def _names(text: str) -> list[str]:
    return text.split()


# Checked beside transformers in float32: logits, and the same bits however a prompt is cut.
TRIED = frozenset(
    _names("""
    afmoe apertus arcee aria_text axk1 beam biogpt bitnet cohere cohere2 cohere2_moe cohere_compass_text
    ctrl cwm deepseek_v2 deepseek_v3 dots1 ernie4_5 exaone4 exaone_moe flex_olmo flint gemma gemma2
    gemma3_text gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode
    gpt_neox gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoeshared helium
    hunyuan_v1_dense hy_v3 hyperclovax jais2 kolibri1 laguna llama mellum mimo_v2_flash minicpm3
    minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder nanochat
    nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss
    smollm3 solar_open stablelm starcoder2 vaultgemma youtu
    """)
)
_RECURRENT = "it has recurrent layers, whose state transformers' code does not leave to others"
_OWN_ATTENTION = "its attention is code of its own, which no function can be registered for"
_ENCODER = "it is an encoder, or a decoder that follows one"
_SPARSE = "an indexer of its own chooses the tokens that are attended to"
_MANY_PASSES = "its layers attend several times in a pass"
_GROUPS = {
    _RECURRENT: """
        bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid inkling_text jamba kimi_linear
        lfm2 lfm2_moe mamba mamba2 minimax nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_5_text
        qwen3_next qwen4_exp qwen4_exp_text recurrent_gemma rwkv xlstm zamba zamba2 zaya""",
    _OWN_ATTENTION: """
        bloom codegen cpmant doge falcon gpt_neo gpt_neox_japanese gptj mpt openai-gpt reformer xglm
        xlm xlnet""",
    _ENCODER: """
        bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert
        data2vec-text electra ernie marian mbart megatron-bert mvp pegasus plbart prophetnet rembert
        roberta roberta-prelayernorm roc_bert roformer trocr whisper xlm-roberta xlm-roberta-xl xmod""",
    _SPARSE: "axk2 deepseek_v32 deepseek_v4 glm_moe_dsa hy_v4",
    _MANY_PASSES: "diffllama hrm_text",
    "chunks of attention, and a scale that counts rows in place of positions": "llama4 llama4_text",
    "layers share keys and values, which would be cached several times": "gemma3n gemma3n_text",
    "its experts are code of its own, which no function can be registered for": "dbrx jetmoe longcat_flash",
    "it reads images or sound by layers within those of the text": "mllama phi4_multimodal",
    "it reads bytes in patches, by several models": "blt",
    "it writes for another model, whose states it reads": "gemma4_assistant gemma4_unified_assistant",
    "it speaks or draws, beside text": "emu3 git moshi musicgen musicgen_melody",
}


REASONS = {name: reason for reason, names in _GROUPS.items() for name in _names(names)}
