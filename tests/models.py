"""The distinct models of the shipped specs: most sizes of a model reduce to the same model."""

from __future__ import annotations

import yaml

from .known import NAMES

SIZES: dict[str, str] = yaml.safe_load("""
  albert_base: albert_large albert_xlarge albert_xxlarge
  bart_base: bart_large
  bart_large_cnn: bart_large_xsum distilbart_cnn_12_6 distilbart_cnn_6_6
  bert_base: bert_base_cased bert_base_chinese bert_base_multilingual bert_base_multilingual_uncased bert_large
    bert_large_cased bert_medium bert_mini bert_small
  bertweet_base: codebert_base_mlm distilroberta_base phobert_base phobert_large roberta_base roberta_large
  biogpt: biogpt_large
  blenderbot_3b: blenderbot_400m
  bloom_560m: bloom_1b1 bloom_1b7 bloom_3b bloom_7b1
  byt5_large: flan_t5_xl flan_t5_xxl t5_v1_1_xl t5_v1_1_xxl
  byt5_xl: byt5_xxl
  cerebras_gpt_111m: cerebras_gpt_1_3b
  codegen_16b: codegen_350m codegen_6b
  codellama_13b: codellama_7b
  deberta_base: deberta_large deberta_xlarge
  deberta_v3_base: deberta_v3_large deberta_v3_small deberta_v3_xsmall mdeberta_v3_base
  deepseek_coder_1_3b: deepseek_coder_6_7b
  deepseek_llm_7b: llama_13b llama_30b llama_7b open_llama_3b
  distilbert_base: distilbert_base_cased distilbert_base_multilingual
  ernie_3_0_medium_zh: ernie_3_0_mini_zh ernie_3_0_nano_zh
  falcon3_10b: falcon3_7b
  flan_t5_base: t5_v1_1_base
  flan_t5_large: t5_v1_1_large
  flan_t5_small: t5_v1_1_small
  fnet_base: fnet_large
  gemma2_2b: gemma2_9b
  gpt2: distilgpt2 gpt2_large gpt2_medium gpt2_xl
  gpt_neo_125m: gpt_neo_1_3b gpt_neo_2_7b
  gpt_oss_20b: gpt_oss_120b
  llama2_13b: llama2_7b llama_65b
  llama31_405b: llama3_405b
  m2m_100_1_2b: nllb_1_3b
  m2m_100_418m: nllb_3_3b nllb_600m
  mbart_large_50: mbart_large_cc25
  mpt_7b: mpt_30b
  mt5_xl: mt5_xxl
  olmo2_13b: olmo2_7b
  opt_125m: opt_13b opt_1_3b opt_2_7b opt_30b opt_66b opt_6_7b
  opus_mt_en_de: opus_mt_de_en opus_mt_en_es opus_mt_en_fr opus_mt_en_zh opus_mt_fr_en opus_mt_zh_en
  pegasus_cnn_dailymail: pegasus_large pegasus_xsum
  pythia_1b: pythia_12b pythia_14m pythia_160m pythia_1_4b pythia_2_8b pythia_31m pythia_410m pythia_6_9b pythia_70m
    stablelm_alpha_3b
  qwen25_0_5b: qwen2_0_5b
  qwen25_1_5b: qwen2_1_5b
  qwen25_72b: qwen2_72b
  qwen25_7b: qwen2_7b
  qwen3_0_6b: qwen3_1_7b
  umt5_xl: umt5_xxl
  xglm_1_7b: xglm_2_9b xglm_564m xglm_7_5b
  xlm_roberta_base: xlm_roberta_large
  xlm_roberta_xl: xlm_roberta_xxl
""")
"""Specs whose reduced models are equal, separated by spaces, by the spec that stands for them in tests.
`tools/check/test_shipped.py` compares them. A spec that is not listed is tested as a distinct model."""
MODEL_OF = {size: name for name, sizes in SIZES.items() for size in sizes.split()}
"""The spec that stands for a listed spec, by name."""
MODELS = [name for name in NAMES if name not in MODEL_OF]
"""Specs with distinct reduced models, one for each. For tests of models; tests of texts and of sizes take `NAMES`."""
