"""The trainer: verl's synchronous v1 trainer without the passes that a distillation step does not need."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import (
    PPOTrainer,
    PPOTrainerColocateAsync,
    PPOTrainerSeparateAsync,
    PPOTrainerSync,
    trainer_separate_async,
)
from verl.utils.seqlen_balancing import calculate_workload, log_seqlen_unbalance
from verl.workers.utils.padding import response_from_nested

from opd_recipes.advantage import divergence_for_advantage
from opd_recipes.check import check_run, updates_once
from opd_recipes.checkpoints import begin, prune, step_folder
from opd_recipes.dataset import ROW_NUMBER
from opd_recipes.grouping import SLACK, for_ranks
from opd_recipes.head_engine import view_columns
from opd_recipes.loss import MOMENTS, pearson
from opd_recipes.rollout import FEATURE_COLUMN, TEACHER_TOKENS
from opd_recipes.selection import FEATURES, Candidates, captured_utility
from opd_recipes.trace import Tracer
from opd_recipes.verl_compat import LiteralMode, warnings_only
from opd_recipes.watch import RunStopped, Watch, living
from opd_recipes.worker import OpdActorRolloutRefWorker, OpdDetachActorWorker

#: The columns that every update reads. The others (raw prompts, rewards, ...) stay in the queue.
UPDATE_COLUMNS = [
    "input_ids",
    "position_ids",
    "multi_modal_inputs",
    "responses",
    "loss_mask",
    "rollout_log_probs",
]

#: What verl's policy-gradient loss reads besides.
ADVANTAGE_COLUMNS = ["prompts", "response_mask", "advantages", "old_log_probs"]

#: What names a rollout in every run.
NAME_COLUMNS = [ROW_NUMBER, "session_id"]

#: In a checkpoint, beside the actor: what the selection has learned.
SELECTOR_FILE = "selector.pt"


# A mixin for the type checker too: its methods are those of verl's trainer.
_Trainer: Any = PPOTrainer if TYPE_CHECKING else object


class OpdTrainerMixin(_Trainer):
    """What every trainer mode shares: the worker class, and the shape of a step."""

    worker_class: type = OpdActorRolloutRefWorker
    _phases = 0  # parts of steps that have begun

    def __init__(self, config):
        self.recipe = check_run(config)
        super().__init__(config)
        self.replay_buffer.poll_interval = self.recipe.poll_interval
        self._tracer: Tracer | None = None
        #: With one update per batch no old log-probs are needed: the importance weight compares the policy that trains with
        #: the rollout's own log-probs, by whichever older weights each token was sampled.
        self.single_update = updates_once(config)
        if "mean_entropy" in self.recipe.selection.needs:
            from opd_recipes import entropy_server

            entropy_server.install()

    def _init_resource_pool_mgr(self):
        super()._init_resource_pool_mgr()
        for role in (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(self.worker_class)

    def _init_dataloader(self):
        super()._init_dataloader()
        self.val_dataset.set_views(self.recipe.validation_views)

    def fit(self, agent_loop_manager):
        alive = living({"the load balancer": self.llm_server_manager.global_load_balancer})
        with Watch(self._position, self.recipe.stall_timeout, alive):
            super().fit(agent_loop_manager)

    def _position(self) -> tuple[int, int, int]:
        """How far the run is: steps, parts of the step, prompts that have all their answers."""
        finished = list(self.replay_buffer.finished_keys.values())
        return self.global_steps, self._phases, sum(map(len, finished))

    def _balance_batch(self, batch: KVBatchMeta, metrics, **kwargs) -> KVBatchMeta:
        self._phases += 1
        expected = (
            self.config.data.train_batch_size // self.parameter_sync_step * self.config.actor_rollout_ref.rollout.n
        )
        failed = expected - len(batch)
        if failed > 0 and self.recipe.on_bad_row == "error":
            raise RuntimeError(
                f"{failed} of {expected} rollouts of step {self.global_steps} failed; the rollout worker's log above says "
                "why. Set data.on_bad_row=skip to go on without such rows"
            )
        metrics["opd/failed_rollouts"] = failed
        if self.recipe.seeded_rollouts:
            # Rollouts arrive in any order; sums in fp32 would depend on it, and a repeated run with them.
            batch = batch.select_keys([batch.keys[i] for i in self._order(batch)])
        return self._balanced(batch, metrics, **kwargs)

    def _balanced(self, batch: KVBatchMeta, metrics: dict, **kwargs) -> KVBatchMeta:
        # verl balances ranks by this tag, which counts the student's tokens only; a rank also runs the teacher on its rows.
        for tag, teacher in zip(batch.tags, self._teacher_tokens(batch), strict=True):
            tag["seq_len"] = tag["prompt_len"] + tag["response_len"] + teacher
        batch = super()._balance_batch(batch, metrics, **kwargs)
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        return _with_prompts_together(batch, ranks, metrics, **kwargs)

    @staticmethod
    def _teacher_tokens(batch: KVBatchMeta) -> list[int]:
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[TEACHER_TOKENS])
        return [int(tokens) for tokens in data[TEACHER_TOKENS]]

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        # A batch that is one update is cut for ranks only, so that few padding rows join the few that were selected.
        return dp_size if self.recipe.selects else super()._get_required_batch_multiple(dp_size)

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if self.recipe.compares_in_update:
            return batch if self.single_update else super()._compute_old_log_prob(batch, metrics)
        # One pass gives the old log-probs and the divergence.
        batch.extra_info["compare"] = True
        batch = super()._compute_old_log_prob(batch, metrics)
        batch.extra_info.pop("compare", None)
        return batch

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if not self.recipe.compares_in_update:
            divergence, mask = self._token_values(batch, "opd_divergence")
            metrics["opd/divergence"] = float((divergence * mask).sum() / mask.sum().clamp(min=1))
            with divergence_for_advantage(divergence, self.recipe.objective):
                return super()._compute_advantage(batch, metrics)
        # The loss has no advantage, but verl's metrics read the column.
        zeros = [torch.zeros(tag["response_len"]) for tag in batch.tags]
        column = torch.nested.as_nested_tensor(zeros, layout=torch.jagged)
        fields = TensorDict({"advantages": column, "returns": column}, batch_size=len(batch))
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    def _token_values(self, batch: KVBatchMeta, column: str) -> tuple[torch.Tensor, torch.Tensor]:
        """What a compare pass has left for each response token, and the mask; both (B, L), padded with 0."""
        fields = [column, "response_mask"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        values = response_from_nested(data[column], data["response_mask"])
        return values.to_padded_tensor(0.0), data["response_mask"].to_padded_tensor(0).to(values.dtype)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        return self._update_selected(batch, metrics) if self.recipe.selects else self._update(batch, metrics)

    def _update_columns(self) -> list[str]:
        if self.recipe.compares_in_update:
            columns = UPDATE_COLUMNS + view_columns(*(name for name in self.recipe.views if name != "student"))
            return columns if self.single_update else [*columns, "old_log_probs"]
        columns = UPDATE_COLUMNS + ADVANTAGE_COLUMNS
        corrected = self.config.algorithm.rollout_correction.get("rollout_is") is not None
        return [*columns, "rollout_is_weights"] if corrected else columns

    def _update(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """verl's update on the columns that it reads; its metrics under our names."""
        self._phases += 1
        narrow = KVBatchMeta(
            partition_id=batch.partition_id,
            keys=batch.keys,
            tags=batch.tags,
            fields=self._update_columns(),
            extra_info={**(batch.extra_info or {}), "whole_batch": self.recipe.selects},
        )
        super()._update_actor(narrow, metrics)
        for key in [key for key in metrics if key.startswith("actor/opd/")]:
            metrics[key.removeprefix("actor/")] = metrics.pop(key)
        moments = {key.removeprefix(MOMENTS): metrics.pop(key) for key in list(metrics) if key.startswith(MOMENTS)}
        if moments:
            metrics["opd/rollout_pearson"] = pearson(moments)
        return batch

    def _update_selected(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """Update on the rollouts that the selection chooses; the others enter neither the teacher's forward nor the student's.

        Returns:
            All rollouts, and the padding rows that were added: verl's metrics read them, and it clears them.
        """
        keys, candidates, tokens = self._candidates(batch)
        chosen = self.recipe.selection.choose(candidates, self.global_steps)
        metrics["selection/share"] = len(chosen) / max(len(keys), 1)
        metrics["selection/teacher_token_share"] = float(tokens[chosen].sum() / max(tokens.sum(), 1))
        if not chosen:
            return batch  # no update: neither weights nor rate nor teacher move
        every = self.recipe.oracle_every
        if every and self.global_steps % every == 0:
            metrics["selection/captured_utility"] = captured_utility(chosen, self._oracle(batch, keys))
        wanted = {keys[i] for i in chosen}
        # With everything selected the batch stays as it is, to the order of its rows.
        subset = batch if len(chosen) == len(keys) else batch.select_keys([key for key in batch.keys if key in wanted])
        if subset is not batch:
            subset = self._balanced(subset, {})
        self._update(subset, metrics)
        utilities = dict(zip(subset.keys, sum(self.actor_rollout_wg.last_utilities(), []), strict=True))
        metrics["selection/utility"] = float(np.mean([utilities[keys[i]] for i in chosen]))
        if math.isfinite(metrics["actor/grad_norm"]):  # a skipped update leaves the selection as it was, too
            learned = self.recipe.selection.learn(self.global_steps, {i: utilities[keys[i]] for i in chosen})
            metrics.update(learned)
        known = set(batch.keys)
        added = [i for i, key in enumerate(subset.keys) if key not in known]
        return KVBatchMeta(
            partition_id=batch.partition_id,
            keys=batch.keys + [subset.keys[i] for i in added],
            tags=batch.tags + [subset.tags[i] for i in added],
            extra_info=batch.extra_info,
        )

    @staticmethod
    def _order(batch: KVBatchMeta) -> list[int]:
        """The rows by row number and session: the same in every run, unlike their keys."""
        return _in_order(tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=NAME_COLUMNS))

    @staticmethod
    def _candidates(batch: KVBatchMeta) -> tuple[list[str], Candidates, np.ndarray]:
        """Keys, features and teacher tokens of the rollouts that have a token that counts, in an order that a rerun repeats."""
        real = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
        fields = [FEATURE_COLUMN, TEACHER_TOKENS, *NAME_COLUMNS]
        data = tq.kv_batch_get(keys=real, partition_id=batch.partition_id, select_fields=fields)
        columns = np.array([row.tolist() for row in data[FEATURE_COLUMN]]).reshape(-1, len(FEATURES))
        counts = columns[:, FEATURES.index("response_length")] > 0
        rows = [i for i in _in_order(data) if counts[i]]
        tokens = np.array([int(count) for count in data[TEACHER_TOKENS]])[rows]
        return [real[i] for i in rows], Candidates(**dict(zip(FEATURES, columns[rows].T, strict=True))), tokens

    def _oracle(self, batch: KVBatchMeta, keys: list[str]) -> list[float]:
        """The utility of every candidate under the weights of this step, without training on it."""
        whole = batch.select_keys(batch.keys)
        temperature = self.config.actor_rollout_ref.rollout.temperature
        whole.extra_info.update(calculate_entropy=True, compute_loss=False, compare=True, temperature=temperature)
        self.actor_rollout_wg.compute_log_prob(whole)
        values, mask = self._token_values(batch.select_keys(keys), "opd_utility")
        return ((values * mask).sum(-1) / mask.sum(-1).clamp(min=1)).tolist()

    def _check_space(self) -> None:
        """Refuse to begin a checkpoint that the disk cannot hold: a part of one is of no use, and a full disk stops others."""
        folder, step = self.config.trainer.default_local_dir, self.global_steps
        os.makedirs(folder, exist_ok=True)
        needed, free = sum(self.actor_rollout_wg.checkpoint_bytes()), shutil.disk_usage(folder).free
        if needed > free:
            raise RuntimeError(
                f"the checkpoint of step {step} needs {needed / 1e9:.1f} GB, but {folder} has {free / 1e9:.1f} GB left. Nothing"
                " of it was written and earlier ones are as they were: free some space (trainer.max_actor_ckpt_to_keep=2 drops "
                "old ones) and start the same command again, which continues from the last (trainer.resume_mode=auto)"
            )

    def _save_checkpoint(self):
        self._phases += 1
        self._check_space()
        home = Path(self.config.trainer.default_local_dir)
        begin(home, self.global_steps)
        state = self.recipe.selection.state_dict()
        if state:  # before verl's part, which ends with naming the checkpoint as the latest
            folder = step_folder(home, self.global_steps)
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(state, folder / SELECTOR_FILE)
        try:
            super()._save_checkpoint()
        except (OSError, RuntimeError) as error:
            raise RunStopped(
                f"the checkpoint of step {self.global_steps} could not be written to {home} ({_last_line(error)}), and is not "
                "the last one until it is. Earlier ones are as they were"
            ) from error
        prune(home, self.config.trainer.max_actor_ckpt_to_keep, self.global_steps)

    def _load_checkpoint(self):
        super()._load_checkpoint()
        if self.global_steps == 0:
            return
        trainer = self.config.trainer
        folder = step_folder(Path(trainer.default_local_dir), self.global_steps)
        file = os.path.join(trainer.resume_from_path if trainer.resume_mode == "resume_path" else folder, SELECTOR_FILE)
        if os.path.exists(file):
            self.recipe.selection.load_state_dict(torch.load(file, weights_only=True))
        elif self.recipe.selection.state_dict():
            raise FileNotFoundError(
                f"{file} is missing: the checkpoint was written without opd.selection.kind=learned, so the selector would "
                "start anew in the middle of a run. Resume with the selection of that run, or set trainer.resume_mode=disable"
            )

    def _compute_metrics(self, batch, metrics, timing_raw, global_steps, epoch):
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        if not self.recipe.compares_in_update:
            return
        # Rewards, advantages and returns are not computed: their zeros would only mislead.
        for key in [key for key in metrics if key.startswith("critic/")]:
            del metrics[key]


def _with_prompts_together(
    batch: KVBatchMeta, ranks: int, metrics: dict, logging_prefix: str = "global_seqlen", **kwargs
) -> KVBatchMeta:
    """The rows, which verl has balanced, with those of a prompt on one rank as far as that leaves the ranks balanced."""
    tokens = [tag["seq_len"] for tag in batch.tags]
    loads = calculate_workload(torch.tensor(tokens)).tolist()
    room = len(loads) // ranks
    most = max(sum(loads[rank * room : (rank + 1) * room]) for rank in range(ranks))
    prompts = [key.rsplit("_", 2)[0] for key in batch.keys]
    shares = for_ranks(loads, prompts, ranks, limit=(1 + SLACK) * most)
    if shares is not None:
        batch.reorder([row for share in shares for row in share])
        metrics.update(log_seqlen_unbalance(tokens, shares, logging_prefix))
    return batch


def _last_line(error: Exception) -> str:
    """Of an error that may be a worker's, whose message is its traceback."""
    return str(error).strip().splitlines()[-1]


def _in_order(data: Any) -> list[int]:
    """Indices of rows with :data:`NAME_COLUMNS` by what names them."""
    names = list(zip(*(map(int, data[column]) for column in NAME_COLUMNS), strict=True))
    return sorted(range(len(names)), key=names.__getitem__)


class OpdTrainerSync(OpdTrainerMixin, PPOTrainerSync):
    """``opd_sync``: rollout, update and weight sync take turns on the same devices."""

    trainer_mode = LiteralMode("sync")

    def on_validate_end(self):
        super().on_validate_end()
        if self.recipe.trace["rows"]:
            if self._tracer is None:
                self._tracer = Tracer(self, self.recipe.trace["folder"], self.recipe.trace["rows"])
            self._tracer.write(self.global_steps)


class OpdTrainerColocateAsync(OpdTrainerMixin, PPOTrainerColocateAsync):
    """``opd_colocate_async``: the same devices, but an update starts when enough rollouts are there; the others go on with
    the new weights."""

    trainer_mode = LiteralMode("colocate_async")


class OpdTrainerSeparateAsync(OpdTrainerMixin, PPOTrainerSeparateAsync):
    """``opd_separate_async``: rollouts on devices of their own, while the actor trains."""

    trainer_mode = LiteralMode("separate_async")
    worker_class = OpdDetachActorWorker

    def _setup(self):
        with warnings_only(trainer_separate_async.logger):
            super()._setup()


TRAINERS = {
    "opd_sync": OpdTrainerSync,
    "opd_colocate_async": OpdTrainerColocateAsync,
    "opd_separate_async": OpdTrainerSeparateAsync,
}
