"""InputFacts: what is known about a run's input files before the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

from backend.config import Data, RunSpec, Source
from backend.data import FIRST_VALIDATION, mixed_counts, printable, sample, split, validation_size
from backend.inspect.cpu_speed import CpuSpeed
from backend.modelspec import ModelShape


@dataclass(frozen=True)
class DataIssue:
    """Something wrong with a data file: the option that names it, the location (file and line), and a message that
    completes the location: "data.jsonl, line 3: is not valid JSON"."""

    field: str
    location: str
    message: str
    is_example: bool = False  # one example of a readable file

    def __str__(self) -> str:
        return printable(f"{self.location}: {self.message}")


@dataclass(frozen=True)
class InputFacts:
    """Facts about the input files of a spec. None or '' where they cannot be known before the run.

    The `*_problem` fields are complete sentences; '' if nothing is wrong. Token counts are estimates, without a
    tokenizer.
    """

    model_type: str = ""  # of config.json
    shape: ModelShape | None = None
    shape_unknown_reason: str = "the model was not inspected"  # completes "..., because ..."; '' with a shape
    config_problem: str = ""  # a value of config.json that no model can have, a sentence
    architecture_problem: str = ""  # why the model is not a causal language model
    needs_remote_code: bool = False  # transformers has no such architecture, and the model brings its own code
    has_own_code: bool | None = None  # the model's folder has Python code that transformers runs; None if unknown
    has_sequence_classification: bool | None = None  # transformers has a reward model class for it; None if unknown
    has_shared_layers: bool = False  # several decoder layers contain the same module
    has_shared_head: bool = False  # the output layer and a module other than the embedding have the same parameter
    layerdrop: float = 0.0  # the probability with which training skips a decoder layer, of config.json
    unused_modules: tuple[str, ...] = ()  # last names of modules with parameters that config.json leaves unused
    lora_refused: tuple[str, ...] = ()  # names of linear layers that cannot have a LoRA adapter
    architecture_pending: bool = False  # a worker process is reading the architecture: `shape` will be known soon
    model_problem: str = ""  # of the model folder
    weights_problem: str = ""  # how the weights in the model folder differ from config.json
    quant_method: str = ""  # of a prequantized checkpoint: quantization_config.quant_method of its config.json
    stacked_modules: tuple[str, ...] = ()  # names by which peft adapts stacked experts (registry.STACKED_EXPERTS)
    has_chat_template: bool | None = None  # the tokenizer has one
    is_downloaded: bool = True  # False: the run downloads the model
    download_problem: str = ""  # why config.json of a Hub model could not be downloaded, the end of a sentence
    data_issues: tuple[DataIssue, ...] = ()
    shared_files: tuple[str, ...] = ()  # training files that are validation files too
    other_splits: tuple[str, ...] = ()  # training files of a folder or pattern that are named like test data
    own_split: tuple[str, ...] = ()  # the other training files, if there are `other_splits`
    left_out_documents: tuple[str, ...] = ()  # plain text documents in folders that have other data files, too
    other_than_documents: tuple[str, ...] = ()  # all training files, if there are `left_out_documents`
    split_files: tuple[str, ...] = ()  # the validation set is split off them, and another dataset trains on that part
    num_distinct: int | None = None  # training examples that no earlier dataset has; only if copies are dropped
    repeats: int = 0  # an earlier dataset that trains on all files of this one, read the same way; 0: none
    format: str = ""  # of the training data: the one that is set, or detected
    columns: tuple[str, ...] = ()
    text_columns: tuple[str, ...] = ()  # those with text in the first example, and no number; single words come last
    column_kinds: tuple[tuple[str, str], ...] = ()  # columns of the first example: (name, text, messages or sharegpt)
    detected_format: str = ""  # of the first example, by its columns, also if another format is set
    num_examples: int | None = None  # in the training files, before a validation split
    completions_per_example: int = 1  # 2 where KTO trains on both completions of a pair; each counts as an example
    num_validation_examples: int | None = None  # in the validation files
    counts_are_exact: bool = True  # False: the number of examples is estimated from the size of a file
    # Desirable and undesirable training completions, before a validation split and max_samples; those of an epoch with
    # several datasets. None unless all were read.
    label_counts: tuple[int, int] | None = None
    token_lengths: tuple[int, ...] = ()  # of training examples that were read, and the longest of all, ascending
    trained_lengths: tuple[int, ...] = ()  # those of examples with a trained token; empty if not known
    sequences_per_example: float = 0.0  # into which training examples are split in pretraining; 0: not known
    lengths_in_order: tuple[int, ...] = ()  # tokens of each training example, if all are known
    labeled_share: float = 1.0  # share of their tokens that have a loss
    cpu: CpuSpeed | None = None  # of this machine, if the run uses it
    cpu_unknown: str = ""  # why the CPU was not measured, the end of a sentence
    cpu_pending: bool = False  # a worker process is measuring it: `cpu` will be known soon
    min_prompt_tokens: int = 0  # tokens before the first completion, of the example that has the fewest
    examples_pending: bool = False  # a worker process is reading and tokenizing the examples
    tokenizer_problem: str = ""  # why the tokenizer cannot be loaded
    tokenizer_size: int = 0  # the tokenizer's largest token id + 1; 0 if unknown
    known_size: int = 0  # the same without data.add_tokens and data.add_special_tokens
    added_rows: int = 0  # rows that the embeddings get for data.add_tokens and data.add_special_tokens, if known
    unrenderable_examples: tuple[DataIssue, ...] = ()  # the chat template raises an error for them
    num_unrenderable: int = 0  # how many there are in the training files, unless they are skipped
    num_unrenderable_validation: int = 0  # same, in the validation files
    num_checked: int = 0  # examples that were read, and tokenized where the tokenizer is on this machine
    all_checked: bool = False  # each data file was read to its end
    examples_problem: str = ""  # why the worker process could not check the examples, the end of a sentence
    num_usable: int | None = None  # examples with a trained token within max_length; None unless all_checked
    unusable_positions: tuple[int, ...] | None = None  # positions of the unusable training examples, if known
    num_usable_validation: int = 0  # same as num_usable, for the examples in the validation files
    num_held_out: int | None = None  # of a streamed dataset: training examples that its validation split takes
    held_out_positions: tuple[int, ...] = ()  # of these
    num_identical_pairs: int = 0  # pairs that are dropped because both completions are the same
    num_dropped: int = 0  # examples without a trained token within max_length
    num_long_pairs: int = 0  # pairs of a reward model that are longer than max_length
    num_unmarked: int = 0  # examples in which this template or tokenizer does not tell completion from prompt
    num_endless: int = 0  # examples in which no token that ends the completion is trained
    num_weightless: int = 0  # examples whose assistant turns all have the weight 0, with a loss on the other tokens
    unread_keys: tuple[tuple[str, int], ...] = ()  # parts of turns that the template leaves out: (words, examples)
    special_tokens: tuple[tuple[str, int], ...] = ()  # in the contents of turns: (token, examples)
    unknown_ends: tuple[tuple[str, int], ...] = ()  # texts that end completions but are not tokens: (text, examples)
    split_markers: tuple[str, ...] = ()  # of ChatML, which the tokenizer splits into several tokens
    num_starts: int = 0  # completions whose beginning was compared in generation and training
    num_different_starts: int = 0  # of these, how many begin differently
    start_difference: tuple[str, ...] = ()  # of the first of them, the arguments of wording.different_start
    start_kwargs: str = ""  # JSON of data.chat_template_kwargs with which both begin the same way
    num_invalid: int = 0  # training examples that cannot be read or do not match the format, unless they are skipped
    num_invalid_validation: int = 0  # same, of the validation files
    num_skipped: int = 0  # examples that cannot be used, with data.on_bad_example skip
    num_skipped_texts: int = 0  # those of them that the chat template or tokenizer fails on
    skipped: tuple[str, ...] = ()  # places and reasons of the first of them
    num_with_weights: int = 0  # examples with an assistant turn whose weight in the loss is not 1
    num_weighted: int = 0  # of these, those with a weight other than 0
    num_with_margin: int = 0  # pairs with a margin, which reward models use
    unlike_llamafactory: tuple[tuple[str, int], ...] = ()  # what LLaMA-Factory does not read: (words, examples)
    num_copies: int = 0  # training examples that are equal to an earlier one, unless they are dropped
    digests: tuple[int, ...] = ()  # hashes of the training examples, if copies are dropped and there are few
    num_copies_in_validation: int = 0  # validation examples that are equal to a training example
    equal_places: tuple[tuple[str, str, str], ...] = ()  # of the first ones: (kind, as in the counts; place, earlier)
    num_contradictions: int = 0  # training examples with another answer than an earlier one
    datasets: tuple[InputFacts, ...] = ()  # if there are several, the facts about each; other fields are about all
    template_problem: str = ""  # of the chat template file
    checkpoint_problem: str = ""  # of save.resume_path
    checkpoint_epoch: float = 0.0  # its position in the epochs of the run that saved it; 0 if not known
    checkpoint_dtype: str = ""  # the compute dtype of the run that saved it, if DeepSpeed did; '' if not known
    checkpoint_options: tuple[tuple[str, Any], ...] = ()  # those it was trained with, where they are the problem
    adapter_problem: str = ""  # of lora.adapter_path
    adapter_options: tuple[tuple[str, Any], ...] = ()  # those of the adapter, where they differ and are the problem
    nvme_problem: str = ""  # of parallel.nvme_path
    nvme_slow_reason: str = ""  # why parallel.nvme_path is not on a fast local disk, a sentence
    trainer_problem: str = ""  # why LLaMA-Factory cannot be started, a sentence
    trainer_environment: str = ""  # the folder that `footplate env create` has made for launch.trainer
    trainer_folder: str = ""  # llamafactory.environment as an absolute path
    trainer_packages: tuple[tuple[str, str], ...] = ()  # in llamafactory.environment: normalized names, versions
    place_problem: str = ""  # why the cluster of launch.place would not run the job
    is_place_known: bool = True  # whether this cluster says which nodes it has
    port_in_use: int = 0  # the run's master port, if another process listens on it
    free_port: int = 0  # the next free port, where `port_in_use` is set
    module_classes: tuple[str, ...] = ()  # class names of the model's modules, layers first; empty if unknown
    module_attributes: frozenset[str] = frozenset()  # without a shape: all attribute names that modules have

    @property
    def num_in_files(self) -> int:
        """Examples in the training and validation files; 0 if unknown."""
        return (self.num_examples or 0) + (self.num_validation_examples or 0)

    @property
    def longest_example(self) -> int:
        """Tokens of the longest example that was read; 0 without any."""
        return self.token_lengths[-1] if self.token_lengths else 0

    @property
    def used_lengths(self) -> tuple[int, ...]:
        """As `token_lengths`, without the examples that the run drops because no token of them is trained."""
        return self.trained_lengths or self.token_lengths

    @property
    def longest_used(self) -> int:
        """Tokens of the longest example that the run uses; 0 if unknown."""
        return self.used_lengths[-1] if self.used_lengths else 0

    def num_in_epoch(self, spec: RunSpec) -> int | None:
        """Sequences of an epoch, without examples that are dropped; with several datasets, those of their mixture."""
        if not self.datasets:
            return self._sequences(spec, spec.data)
        sizes = [size for size in self.sizes(spec) if size is not None]
        return sum(self.mixture(spec.data, sizes)) if len(sizes) == len(self.datasets) else None

    def num_train_examples(self, data: Source) -> int | None:
        """Examples in the training set of one dataset, after the validation split and data.max_samples."""
        if self.num_examples is None:
            return None
        count = self.num_examples - (self._split_size(data) if data.splits else 0)
        return min(count, data.max_samples) if data.max_samples else count

    def sizes(self, spec: RunSpec) -> list[int | None]:
        """The training sequences of each of several datasets, without examples that are dropped; None where that is not
        known."""
        return [each._sequences(spec, own) for each, own in zip(self.datasets, spec.data.datasets, strict=True)]

    def _sequences(self, spec: RunSpec, data: Source) -> int | None:
        usable, count = self.usable_examples(data, spec.train.seed), self.num_train_examples(data)
        if spec.train.stage == "pretraining" and count and len(self.lengths_in_order) == self.num_examples:
            share = data.validation_split if data.splits else 0.0
            selected = _selected(self.num_examples, 1, share, data.max_samples, spec.train.seed)[0]
            return sum(num_sequences(self.lengths_in_order[n], spec.data.max_length) for n in selected)
        if spec.train.stage == "pretraining" and count and self.sequences_per_example:  # long texts are split
            return round(count * self.sequences_per_example)
        if spec.train.stage == "pretraining" and count and self.token_lengths:
            sequences = sum(-(-length // spec.data.max_length) for length in self.token_lengths)
            return round(count * sequences / len(self.token_lengths))
        return count if usable is None else usable[0]

    @staticmethod
    def mixture(data: Data, sizes: Sequence[int]) -> list[int]:
        """How many examples of each dataset an epoch has."""
        return mixed_counts(sizes, [source.weight for source in data.datasets], data.mixing)

    def num_eval_examples(self, data: Source) -> int | None:
        """Examples in the validation set."""
        if self.datasets and isinstance(data, Data):
            found = [each.num_eval_examples(own) for each, own in zip(self.datasets, data.datasets, strict=True)]
            return None if None in found else sum(count or 0 for count in found)
        if data.source != "builtin" and data.validation == "none":
            return 0
        if data.splits:
            if self.num_examples is None:
                return None
            size = self._split_size(data)
            return min(size, FIRST_VALIDATION) if _is_streamed(data) else size
        return self.num_validation_examples

    def num_eval_prompts(self, data: Source) -> int | None:
        """Most validation examples for whose prompts outputs can be generated: one of the two that KTO makes of a
        pair."""
        if self.datasets and isinstance(data, Data):
            found = [each.num_eval_prompts(own) for each, own in zip(self.datasets, data.datasets, strict=True)]
            return None if None in found else sum(count or 0 for count in found)
        count = self.num_eval_examples(data)
        return count and count // self.completions_per_example

    def _split_size(self, data: Source) -> int:
        """Examples in the validation split."""
        completions, count = self.completions_per_example, self.num_examples or 0
        if _is_streamed(data) and self.num_held_out is not None:
            return self.num_held_out
        return completions * validation_size(count // completions, data.validation_split)

    def usable_examples(self, data: Source, seed: int) -> tuple[int, int] | None:
        """Examples of the training set and of the validation set that have a trained token; None if unknown."""
        if self.datasets and isinstance(data, Data):
            found = [each.usable_examples(own, seed) for each, own in zip(self.datasets, data.datasets, strict=True)]
            known = [counts for counts in found if counts is not None]
            return (sum(n for n, _ in known), sum(n for _, n in known)) if len(known) == len(found) else None
        if self.num_usable is None or self.unusable_positions is None or not self.num_examples:
            return None
        if _is_streamed(data):
            return self._usable_of_stream(data)
        share = data.validation_split if data.splits else 0.0
        train, validation = self.num_train_examples(data) or 0, self.num_eval_examples(data) or 0
        if self.unusable_positions:
            selection = self.num_examples, self.completions_per_example, share, data.max_samples, seed
            train, validation = _usable_examples(self.unusable_positions, *selection)
        return train, validation if share else self.num_usable_validation

    def _usable_of_stream(self, data: Source) -> tuple[int, int] | None:
        """Same as `usable_examples`, of a streamed dataset: it trains on the first examples, and the content of an
        example decides whether the validation split takes it."""
        if data.splits and self.num_held_out is None:
            return None
        held_out = self.held_out_positions if data.splits else ()
        selection = held_out, self.num_examples or 0, data.max_samples
        train, validation = _usable_of_stream(self.unusable_positions or (), *selection)
        return train, validation if data.splits else self.num_usable_validation


def _is_streamed(data: Source) -> bool:
    return isinstance(data, Data) and data.streaming


def num_sequences(length: int, limit: int) -> int:
    """Into how many sequences pretraining splits a text. A single token at its end has no next one, and is dropped."""
    return length // limit + (length % limit > 1)


@lru_cache(maxsize=64)
def _usable_examples(
    unusable: tuple[int, ...], count: int, completions: int, share: float, max_samples: int, seed: int
) -> tuple[int, int]:
    """Usable examples of the training set and of the validation split."""
    train, validation = _selected(count, completions, share, max_samples, seed)
    dropped = set(unusable)
    return sum(n not in dropped for n in train), sum(n not in dropped for n in validation)


@lru_cache(maxsize=64)
def _usable_of_stream(
    unusable: tuple[int, ...], held_out: tuple[int, ...], count: int, max_samples: int
) -> tuple[int, int]:
    """Usable examples of the training set and of the validation split of a streamed dataset."""
    dropped, others = set(unusable), set(held_out)
    train = [n for n in range(count) if n not in others][: max_samples or None]
    return sum(n not in dropped for n in train), sum(n not in dropped for n in held_out[:FIRST_VALIDATION])


@lru_cache(maxsize=64)
def _selected(count: int, completions: int, share: float, max_samples: int, seed: int) -> tuple[list[int], list[int]]:
    """The positions of the examples of the training set and of the validation split, selected as in the run."""
    examples = [range(start, start + completions) for start in range(0, count, completions)]
    train, validation = split(examples, share, seed) if share else (examples, [])
    return sample([*chain(*train)], max_samples, seed), [*chain(*validation)]
