"""The plugins that ship with mortice beside the basics, one entry point each.

They register lazily (`module:Class`), so that listing them imports no mlx; a third-party plugin may simply
put its hook implementation beside its class.
"""

from __future__ import annotations

from types import ModuleType

from mortice.hookspecs import HOOKS, hookimpl


def _plugin(kind: str, target: str, help: str, *names: str) -> ModuleType:
    """A plugin object that registers one class under one or more names."""

    @hookimpl
    def register_strategy(register):
        for name in names:
            register(name, target, help=help)

    module = ModuleType(f"mortice_plugins.{names[0]}", help)
    setattr(module, HOOKS[kind], register_strategy)
    return module


sft = _plugin(
    "loss", "mortice_plugins.losses.sft:SFT", "Next-token cross-entropy of completions, or of everything.", "sft"
)
orpo = _plugin(
    "loss",
    "mortice_plugins.losses.orpo:ORPO",
    "Odds-ratio preference optimisation: NLL plus λ times the log-odds term; no reference model.",
    "orpo",
)
dpo = _plugin(
    "loss",
    "mortice_plugins.losses.dpo:DPO",
    "Preference loss on the log-ratios of policy to reference: −log σ of the reward margin, and its variants.",
    "dpo",
)
ipo = _plugin(
    "loss",
    "mortice_plugins.losses.ipo:IPO",
    "Squared distance of the log-ratio margin from 1/(2·beta), on means over tokens.",
    "ipo",
)
exo = _plugin(
    "loss",
    "mortice_plugins.losses.exo:EXO",
    "Reverse KL between the policy's preference of a pair and its smoothed label.",
    "exo",
)
nca = _plugin(
    "loss",
    "mortice_plugins.losses.nca:NCA",
    "Noise contrastive alignment of pairs: each reward against 0, not only against the other one.",
    "nca",
)
bco = _plugin(
    "loss",
    "mortice_plugins.losses.bco:BCO",
    "Binary cross-entropy with the reward as logit: chosen is 1, rejected 0; with or without a reward shift.",
    "bco",
)
sppo = _plugin(
    "loss",
    "mortice_plugins.losses.sppo:SPPO",
    "Squared distances of the log-ratios from ½/beta for the chosen and −½/beta for the rejected response.",
    "sppo",
)
apo_zero = _plugin(
    "loss",
    "mortice_plugins.losses.apo:APOZero",
    "Chosen up and rejected down, each from its own anchor: for answers better than the model's own.",
    "apo-zero",
)
apo_down = _plugin(
    "loss",
    "mortice_plugins.losses.apo:APODown",
    "Both responses down, the rejected one more: for answers worse than the model's own.",
    "apo-down",
)
discopop = _plugin(
    "loss",
    "mortice_plugins.losses.discopop:DiscoPOP",
    "Logistic loss for pairs in the wrong order, exponential loss for those in the right one.",
    "discopop",
)
simpo = _plugin(
    "loss",
    "mortice_plugins.losses.simpo:SimPO",
    "Preference loss on mean log-probabilities with a target margin; no reference model.",
    "simpo",
)
cpo = _plugin(
    "loss",
    "mortice_plugins.losses.cpo:CPO",
    "Preference loss on summed log-probabilities, with the NLL of the chosen response; no reference model.",
    "cpo",
)
kto = _plugin(
    "loss",
    "mortice_plugins.losses.kto:KTO",
    "Preference loss of single answers that are labelled desirable or not; no pairs.",
    "kto",
)
bradley_terry = _plugin(
    "loss",
    "mortice_plugins.losses.bradley_terry:BradleyTerry",
    "Loss of a reward model: −log σ of the reward margin of chosen against rejected.",
    "bradley-terry",
)
adaptive_lambda = _plugin(
    "controller",
    "mortice_plugins.controllers.adaptive_lambda:AdaptiveLambda",
    "The weight of ORPO's odds term, grown while chosen answers hold and shrunk when they fall.",
    "adaptive-lambda",
)
flash_cce = _plugin(
    "head",
    "mortice_plugins.heads.flash_cce:FlashCCE",
    "Log-probabilities and their gradient in one pass over vocabulary tiles; never holds full logits.",
    "flash-cce",
)
chunked = _plugin(
    "head",
    "mortice_plugins.heads.chunked:Chunked",
    "Full logits of a few tokens at a time: simple, with the memory of one chunk.",
    "chunked",
)
reward = _plugin(
    "head",
    "mortice_plugins.heads.reward:Reward",
    "One reward for each answer, read off the hidden state of its last token; weights of its own.",
    "reward",
)
segmented = _plugin(
    "backward",
    "mortice_plugins.backwards.segmented:Segmented",
    "Backward through a few blocks at a time; memory of one segment.",
    "segmented",
)
checkpoint = _plugin(
    "backward",
    "mortice_plugins.backwards.checkpoint:Checkpoint",
    "One value_and_grad that recomputes the insides of segments.",
    "checkpoint",
)
prefix_shared = _plugin(
    "layout",
    "mortice_plugins.layouts.prefix_shared:PrefixShared",
    "One row a group: its prompt runs once, completions branch from it.",
    "prefix-shared",
)
packed = _plugin(
    "layout",
    "mortice_plugins.layouts.packed:Packed",
    "Several groups in one row, up to a budget of tokens.",
    "packed",
)
grpo = _plugin(
    "loss",
    "mortice_plugins.losses.grpo:GRPO",
    "Clipped policy gradient of sampled groups: GRPO, BNPO, Dr. GRPO, DAPO, CISPO, GSPO.",
    "grpo",
)
rloo = _plugin(
    "loss", "mortice_plugins.losses.rloo:RLOO", "REINFORCE on whole answers, against the others of their group.", "rloo"
)
llama = _plugin(
    "model", "mortice_plugins.models.llama:LlamaAdapter", "Llama 2 and 3, SmolLM2, MiniCPM5, Mistral, Qwen3.", "llama"
)
gemma4 = _plugin(
    "model",
    "mortice_plugins.models.gemma4:Gemma4Adapter",
    "Gemma 4 text decoders: E2B, E4B, 12B, 31B, 26B-A4B.",
    "gemma4",
)
qwen3_5 = _plugin(
    "model",
    "mortice_plugins.models.qwen3_5:Qwen35Adapter",
    "Qwen3.5 dense text decoders: gated delta rule and attention.",
    "qwen3_5",
)
preference = _plugin(
    "data",
    "mortice_plugins.formats.preference:Preference",
    "A prompt with a chosen and a rejected answer.",
    "preference",
    "dpo",
)
rated = _plugin(
    "data",
    "mortice_plugins.formats.rated:Rated",
    "A prompt with several rated answers; pairs are made of those whose ratings are apart.",
    "rated",
)
ultrafeedback = _plugin(
    "data",
    "mortice_plugins.formats.ultrafeedback:UltraFeedback",
    "UltraFeedback's records, as published (rated answers) or binarized.",
    "ultrafeedback",
)
hh = _plugin(
    "data",
    "mortice_plugins.formats.hh:HH",
    'Pairs of whole transcripts, "Human: … Assistant: …"; the last answers are scored.',
    "hh",
)
unpaired = _plugin(
    "data",
    "mortice_plugins.formats.unpaired:Unpaired",
    "A prompt, its answer, and whether that is desirable.",
    "unpaired",
)
prompt = _plugin(
    "data", "mortice_plugins.formats.prompt:PromptFormat", "A prompt alone, for answers that are sampled.", "prompt"
)
chat = _plugin("data", "mortice_plugins.formats.chat:Chat", "A list of messages; assistant turns are scored.", "chat")
completion = _plugin(
    "data", "mortice_plugins.formats.completion:CompletionFormat", "A prompt and its completion.", "completion"
)
text = _plugin("data", "mortice_plugins.formats.text:Text", "Raw text, scored whole.", "text")
score_gap = _plugin(
    "filter",
    "mortice_plugins.filters.pairwise:ScoreGap",
    "Leaves out pairs whose scores are too close, or the wrong way round.",
    "score-gap",
)
gap_weight = _plugin(
    "filter", "mortice_plugins.filters.pairwise:GapWeight", "Weighs pairs by their score gap.", "gap-weight"
)
length_ratio = _plugin(
    "filter",
    "mortice_plugins.filters.pairwise:LengthRatio",
    "Leaves out pairs of which one answer is much longer than the other.",
    "length-ratio",
)
identical = _plugin(
    "filter",
    "mortice_plugins.filters.pairwise:Identical",
    "Leaves out pairs whose two answers are the same.",
    "identical",
)
duplicates = _plugin(
    "filter",
    "mortice_plugins.filters.repeats:Duplicates",
    "Leaves out what an earlier row has already.",
    "duplicates",
)
ambiguous = _plugin(
    "filter",
    "mortice_plugins.filters.repeats:Ambiguous",
    "Leaves out pairs that are there in both orders.",
    "ambiguous",
)
length = _plugin(
    "filter",
    "mortice_plugins.filters.length:Length",
    "Leaves out rows with a prompt or an answer that is too short or too long.",
    "length",
)
regex_reward = _plugin(
    "reward", "mortice_plugins.rewards.regex:Regex", "1 where a pattern matches the answer.", "regex"
)
boxed_reward = _plugin(
    "reward", "mortice_plugins.rewards.boxed:Boxed", r"1 where the last \boxed{…} holds the right answer.", "boxed"
)
reward_model = _plugin(
    "reward",
    "mortice_plugins.rewards.reward_model:RewardModel",
    "What a trained reward model says of the answer.",
    "reward-model",
)
length_reward = _plugin(
    "reward", "mortice_plugins.rewards.length:Length", "1 where the length of the answer is within bounds.", "length"
)
gsm8k_reward = _plugin(
    "reward", "mortice_plugins.rewards.gsm8k:GSM8K", 'The number behind "####" is the right one.', "gsm8k"
)
task_reward = _plugin("reward", "mortice_plugins.rewards.task:TaskReward", "A score of the run's task.", "task")
python_reward = _plugin(
    "reward", "mortice_plugins.rewards.python:PythonReward", "A Python function of yours; runs its code.", "python"
)
arithmetic = _plugin(
    "task", "mortice_plugins.tasks.arithmetic:Arithmetic", "Sums, differences and products.", "arithmetic"
)
copy = _plugin("task", "mortice_plugins.tasks.sequences:Copy", "Digits, given back as they are.", "copy")
sort = _plugin("task", "mortice_plugins.tasks.sequences:Sort", "Digits, given back in order.", "sort")
gsm8k = _plugin("task", "mortice_plugins.tasks.gsm8k:GSM8K", "Word problems of grade-school mathematics.", "gsm8k")
ifeval_reward = _plugin(
    "reward", "mortice_plugins.rewards.ifeval:IFEval", "Which verifiable instructions the answer follows.", "ifeval"
)
ifeval = _plugin("task", "mortice_plugins.tasks.ifeval:IFEval", "Prompts with verifiable instructions.", "ifeval")
openai_compatible = _plugin(
    "rollout",
    "mortice_plugins.rollouts.openai_compatible:OpenAICompatible",
    "Answers from a server with OpenAI's completions interface.",
    "openai-compatible",
)
