"""What ``mutants.py`` breaks: changes of the staged path, one by one, and which tests are to notice."""

from __future__ import annotations

from dataclasses import dataclass

from places import ROOT


@dataclass(frozen=True)
class Change:
    """One line of the staged path as it must not be.

    Attributes:
        file: that has it, below torchft/.
        old: what the file has just once: the line, or a part of it, and a neighbour where others are alike.
        new: what stands there instead.
        harm: what that would do to a user.
        tests: ids, below tests/, of those that should notice.
    """

    file: str
    old: str
    new: str
    harm: str
    tests: tuple[str, ...]

    @property
    def path(self) -> str:
        """The file, below the checkout."""
        return f"torchft/{self.file}"

    def where(self) -> str:
        """Returns ``file:line`` of what changes."""
        line = self._text()[: self._text().index(self.old)].count("\n") + 1
        for before, after in zip(self.old.splitlines(), self.new.splitlines(), strict=False):
            if before != after:
                break
            line += 1
        return f"{self.path}:{line}"

    def mutated(self) -> str:
        """Returns the text of the file with the change.

        Raises:
            ValueError: what is to change is not there exactly once.
        """
        text = self._text()
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.path} has {text.count(self.old)} times, instead of once, {self.old!r}: say in "
                "tests/support/mutant_changes.py what stands there now"
            )
        return text.replace(self.old, self.new)

    def _text(self) -> str:
        return (ROOT / self.path).read_text(encoding="utf-8")


CHANGES = [
    Change(
        "local_sgd.py",
        "checks.check_sync_every(sync_every)",
        "pass",
        "sync_every=0 never synchronizes, 1.5 does at odd steps",
        ("unit/test_bad_input.py::test_sync_every",),
    ),
    Change(
        "local_sgd.py",
        "checks.check_step_hooks(optimizer)",
        "pass",
        "an optimizer without hooks trains alone for ever",
        ("unit/test_bad_input.py::test_optimizer_without_step_hooks",),
    ),
    Change(
        "local_sgd.py",
        "checks.check_quorum_mode(manager)",
        "pass",
        "the Manager's defaults divide all weights by the number of groups",
        ("unit/test_bad_input.py::test_quorum_settings_that_destroy_weights",),
    ),
    Change(
        "local_sgd.py",
        "checks.check_parameters(model)",
        "pass",
        "integer parameters are found out at the first synchronization, with peers waiting",
        ("unit/test_bad_input.py::test_dtype_without_average",),
    ),
    Change(
        "local_sgd.py",
        "checks.check_process_group(manager, model, offload_allreduce_to_cpu)",
        "pass",
        "NCCL with a host all-reduce rejects every synchronization",
        (
            "unit/test_bad_input.py::test_process_group_that_cannot_reduce_on_the_host",
            "unit/test_rejections.py::test_nccl_is_refused_for_parameters_on_the_cpu",
        ),
    ),
    Change(
        "local_sgd.py",
        "checks.warn_of_other_optimizers(model, optimizer)",
        "pass",
        "of two optimizers one decides alone when to synchronize, and nobody says so",
        ("unit/test_optimizers.py::test_optimizer_without_all_trainable_parameters",),
    ),
    Change(
        "local_sgd.py",
        "self._let_peers_read()\n        # An exception",
        "pass\n        # An exception",
        "after a step that raised no peer can heal from this group before its next step",
        ("unit/test_optimizers.py::test_lock_is_released_after_a_step_that_raised",),
    ),
    Change(
        "local_sgd.py",
        "@_disable_dynamo\n    def _step_pre_hook",
        "def _step_pre_hook",
        "a compiled optimizer step traces the Manager and fails",
        ("unit/test_optimizers.py::test_compiled_step_synchronizes",),
    ),
    Change(
        "local_sgd.py",
        "@_disable_dynamo\n    def _step_post_hook",
        "def _step_post_hook",
        "a compiled optimizer step traces the Manager: nothing is ever committed",
        ("unit/test_optimizers.py::test_compiled_step_synchronizes",),
    ),
    Change(
        "local_sgd.py",
        "self._outcome.check()\n",
        "pass\n",
        "after Ctrl-C in a synchronization the next one asks for a quorum and makes peers wait",
        ("unit/test_interrupted.py::test_synchronization_without_known_outcome_is_the_last",),
    ),
    Change(
        "local_sgd.py",
        "checks.check_ready(self._model)\n        self._let",
        "pass\n        self._let",
        "parameters that became bad since construction are found out with peers waiting",
        ("unit/test_bad_input.py::test_lazy_parameter",),
    ),
    Change(
        "local_sgd.py",
        "self._outcome.at = outcome.IN_QUORUM\n",
        "pass\n",
        "a state that was half loaded while healing is averaged into the peers",
        ("unit/test_outcome.py::test_exception_in_the_quorum",),
    ),
    Change(
        "local_sgd.py",
        "except Exception:\n            # A quorum",
        "except BaseException:\n            # A quorum",
        "Ctrl-C in the quorum is forgiven: a state half loaded is averaged into the peers",
        ("unit/test_outcome.py::test_exception_in_the_quorum",),
    ),
    Change(
        "local_sgd.py",
        " and outcome.quorum_is_over(self._manager)",
        "",
        "an alarm while the quorum goes on is forgiven: stale weights are averaged",
        ("unit/test_outcome.py::test_exception_in_the_quorum",),
    ),
    Change(
        "local_sgd.py",
        "self._outcome.at = None\n            raise\n",
        "pass\n            raise\n",
        "a quorum that never came about ends training: the object refuses for ever",
        ("unit/test_outcome.py::test_exception_in_the_quorum",),
    ),
    Change(
        "local_sgd.py",
        "self._outcome.at = None\n\n    def _perform_sync",
        "pass\n\n    def _perform_sync",
        "a subclass with a _perform_sync() of its own is refused from its second synchronization on",
        ("unit/test_subclasses.py::test_stand_in_for_perform_sync_is_no_reason_to_refuse",),
    ),
    Change(
        "local_sgd.py",
        "self._outcome.check(outcome.IN_QUORUM)\n        averages",
        "pass\n        averages",
        "a subclass with its own sync() goes on after Ctrl-C and pairs old collectives with new ones",
        ("unit/test_subclasses.py::test_interrupted_subclass_is_refused",),
    ),
    Change(
        "local_sgd.py",
        "self._outcome.at = outcome.IN_VOTE",
        "pass",
        "after a vote without an answer one is told that it never came to the vote",
        ("unit/test_interrupted.py::test_synchronization_without_known_outcome_is_the_last",),
    ),
    Change(
        "local_sgd.py",
        "committed = self._manager.should_commit()",
        "committed = True",
        "averages are written without a vote",
        ("unit/test_local_sgd.py::test_parameters_keep_storage_and_averages_have_no_history",),
    ),
    Change(
        "local_sgd.py",
        "committed = self._manager.should_commit()",
        "self._write_back(averages); committed = self._manager.should_commit()",
        "parameters are written before the vote and stay so after a no",
        ("unit/test_local_sgd.py::test_parameters_keep_storage_and_averages_have_no_history",),
    ),
    Change(
        "local_sgd.py",
        "if committed:\n                self._outcome",
        "if True:\n                self._outcome",
        "averages are written after a no",
        ("unit/test_local_sgd.py::test_parameters_keep_storage_and_averages_have_no_history",),
    ),
    Change(
        "local_sgd.py",
        "self._outcome.at = outcome.IN_WRITE_BACK",
        "pass",
        "after a torn write-back one is told of the vote",
        ("unit/test_interrupted.py::test_exception_in_write_back_is_the_last",),
    ),
    Change(
        "local_sgd.py",
        "self._write_back(averages)\n",
        "pass\n",
        "a committed average is thrown away",
        ("unit/test_local_sgd.py::test_parameters_keep_storage_and_averages_have_no_history",),
    ),
    Change(
        "local_sgd.py",
        "self._outcome.at = None\n        except BaseException as error",
        "pass\n        except BaseException as error",
        "every synchronization but the first is refused",
        (
            "unit/test_local_sgd.py::test_optimizer_hooks_drive_the_staged_path",
            "unit/test_rejections.py::test_a_commit_starts_the_count_again",
        ),
    ),
    Change(
        "local_sgd.py",
        "except BaseException as error:",
        "except Exception as error:",
        "a KeyboardInterrupt that somebody holds keeps the window and the averages",
        ("unit/test_interrupted.py::test_held_exception_holds_no_buffers",),
    ),
    Change(
        "local_sgd.py",
        "drop_locals(error)",
        "pass",
        "an exception that somebody holds keeps the window and the averages",
        ("unit/test_interrupted.py::test_held_exception_holds_no_buffers",),
    ),
    Change(
        "local_sgd.py",
        "self._buffers.release()",
        "pass",
        "whoever holds the buffers of the last synchronization keeps M on the device",
        (
            "unit/test_interrupted.py",
            "unit/test_subclasses.py",
        ),
    ),
    Change(
        "local_sgd.py",
        "before = self._outcome.at\n        self._outcome.check(outcome.IN_QUORUM)",
        "before = self._outcome.at",
        "a subclass with its own sync() and _perform_sync() goes on after Ctrl-C",
        ("unit/test_subclasses.py::test_interrupted_subclass_is_refused",),
    ),
    Change(
        "local_sgd.py",
        "buffers.release_window()",
        "pass",
        "a subclass that votes by itself keeps the window until it has voted",
        ("unit/test_subclasses.py",),
    ),
    Change(
        "local_sgd.py",
        "self._outcome.at = before",
        "pass",
        "a subclass that votes by itself is refused from its second synchronization on",
        ("unit/test_subclasses.py::test_healthy_subclass_is_not_refused",),
    ),
    Change(
        "local_sgd.py",
        '@torch.no_grad()\n    @torch.profiler.record_function("torchft::local_sgd::reduce_and_stage")',
        '@torch.profiler.record_function("torchft::local_sgd::reduce_and_stage")',
        "averages carry autograd history",
        ("unit/test_local_sgd.py::test_parameters_keep_storage_and_averages_have_no_history",),
    ),
    Change(
        "local_sgd.py",
        "with on_device(slot.device):\n                slot.copy_(",
        "if True:\n                slot.copy_(",
        "on CUDA, of parameters on another than the current device undivided sums are staged",
        ("unit/test_local_sgd_ordering.py::test_device_is_the_current_one_in_its_allreduce_and_in_the_wait",),
    ),
    Change(
        "local_sgd.py",
        "with on_device(slot.device):\n                work.wait()",
        "if True:\n                work.wait()",
        "wait() orders nothing on a device that is not the current one",
        ("unit/test_local_sgd_ordering.py::test_device_is_the_current_one_in_its_allreduce_and_in_the_wait",),
    ),
    Change(
        "local_sgd.py",
        "with on_device(slot.device):\n                buffers.host",
        "if True:\n                buffers.host",
        "the copy to the host runs on the stream of another device",
        ("unit/test_local_sgd_ordering.py",),
    ),
    Change(
        "local_sgd.py",
        "in_flight.append((index, slot, self._manager.allreduce(slot)))\n",
        "in_flight.append((index, slot, self._manager.allreduce(slot))); in_flight[-1][2].wait()\n",
        "a window gains nothing: its all-reduces are carried out one after the other",
        ("unit/test_log.py",),
    ),
    Change(
        "local_sgd.py",
        "drop_failed_collective(self._manager)\n        # All of a round",
        "pass\n        # All of a round",
        "of two failures in one round the first keeps the window where log records are kept",
        ("unit/test_interrupted.py",),
    ),
    Change(
        "local_sgd.py",
        "work.wait()\n            drop_failed_collective(self._manager)\n        finish",
        "work.wait()\n        finish",
        "of two failures in one round the first keeps the window where log records are kept",
        ("unit/test_interrupted.py::test_several_kept_failures_hold_no_memory",),
    ),
    Change(
        "local_sgd.py",
        "work.wait()\n            drop_failed_collective(self._manager)\n        finish",
        "pass\n            drop_failed_collective(self._manager)\n        finish",
        "what is staged is not reduced yet",
        ("unit/test_local_sgd.py::test_bit_identical_to_release_and_mixed",),
    ),
    Change(
        "local_sgd.py",
        "finish_divisions({slot.device for _, slot, _ in in_flight})",
        "pass",
        "on accelerators that TorchFT has no streams for undivided sums are staged",
        ("unit/test_local_sgd_ordering.py::test_averages_are_divided",),
    ),
    Change(
        "local_sgd.py",
        "buffers.host[index].copy_(slot)",
        "buffers.host[index] = slot.cpu()",
        "with parameters on the CPU the average is the window itself: the last one wins",
        ("unit/test_local_sgd.py::test_bit_identical_to_release_and_mixed",),
    ),
    Change(
        "local_sgd.py",
        "with on_device(buffers.plan.layouts[index].device):",
        "if True:",
        "the copy to the host runs on the stream of another device",
        ("unit/test_local_sgd_ordering.py",),
    ),
    Change(
        "local_sgd.py",
        "in_flight.append(self._manager.allreduce(copy))",
        "in_flight.append(self._manager.allreduce(copy)); in_flight[-1].wait()",
        "a host all-reduce takes as long as all of its all-reduces one after the other",
        ("unit/test_log.py",),
    ),
    Change(
        "local_sgd.py",
        "drop_failed_collective(self._manager)\n        for work",
        "pass\n        for work",
        "of two failures in one synchronization the first keeps the averages where log records are kept",
        ("unit/test_interrupted.py",),
    ),
    Change(
        "local_sgd.py",
        "work.wait()\n            drop_failed_collective(self._manager)\n\n",
        "work.wait()\n\n",
        "of two failures in one synchronization the first keeps the averages where log records are kept",
        ("unit/test_interrupted.py::test_several_kept_failures_hold_no_memory",),
    ),
    Change(
        "local_sgd.py",
        "work.wait()\n            drop_failed_collective(self._manager)\n\n",
        "pass\n            drop_failed_collective(self._manager)\n\n",
        "a group votes on averages that are not there yet",
        ("unit/test_local_sgd.py::test_bit_identical_to_release_and_mixed",),
    ),
    Change(
        "local_sgd.py",
        '@torch.no_grad()\n    @torch.profiler.record_function("torchft::local_sgd::write_back")',
        '@torch.profiler.record_function("torchft::local_sgd::write_back")',
        "write-back leaves autograd history on parameters",
        ("unit/test_local_sgd.py",),
    ),
    Change(
        "local_sgd.py",
        "parameters = list(self._model.parameters())\n        change",
        'parameters = [p for g in self._local_optimizer.param_groups for p in g["params"]]\n        change',
        "a group that healed in the vote writes the average into parameters that the model no longer has",
        ("unit/test_local_sgd.py::test_healing_in_the_vote_may_replace_parameters",),
    ),
    Change(
        "local_sgd.py",
        "if change is not None:",
        "if False:",
        "a model that changed in the vote is torn",
        ("unit/test_outcome.py::test_parameters_that_changed_in_the_vote_are_not_written",),
    ),
    Change(
        "local_sgd.py",
        "self._outcome.at = outcome.CHANGED",
        "pass",
        "one is told of a torn write-back where nothing was written",
        ("unit/test_outcome.py::test_parameters_that_changed_in_the_vote_are_not_written",),
    ),
    Change(
        "local_sgd.py",
        "with on_device(self._buffers.plan.layouts[index].device):",
        "if True:",
        "the copy back runs on the stream of another device",
        ("unit/test_local_sgd_ordering.py",),
    ),
    Change(
        "local_sgd.py",
        "average = self._buffers.bring_back(index, average)",
        "average = average.to(self._buffers.plan.layouts[index].device)",
        "memory is taken on the device after the vote: running out of it tears the model",
        ("unit/test_subclasses.py::test_memory_bound_of_subclasses",),
    ),
    Change(
        "local_sgd.py",
        "parameter = local_shard(parameter.detach())",
        "pass",
        "FSDP2's CPU offload takes a shard of device memory after the vote",
        ("unit/test_local_sgd.py::test_extra_device_memory_of_shards",),
    ),
    Change(
        "local_sgd.py",
        "shape=parameter.shape,\n            stride=parameter.stride(),",
        "",
        "uneven shards can't be written back",
        ("unit/test_unsharded.py",),
    ),
    Change(
        "local_sgd.py",
        "parameter.data.copy_(local_tensor)",
        "parameter.data = local_tensor",
        "parameters get other storage: flat views of them go stale",
        ("unit/test_local_sgd.py::test_parameters_keep_storage_and_averages_have_no_history",),
    ),
    Change(
        "local_sgd.py",
        "None if self._plan_logged else host_shortage",
        "host_shortage",
        "the warning of too little host memory comes at each synchronization",
        ("unit/test_log.py::test_one_warning_when_the_host_memory_does_not_suffice",),
    ),
    Change(
        "local_sgd.py",
        "logger.warning(shortage)",
        "pass",
        "the kernel kills the process, and nobody said that host memory is short",
        ("unit/test_log.py::test_one_warning_when_the_host_memory_does_not_suffice",),
    ),
    Change(
        "local_sgd.py",
        "self._outcome.at = outcome.BEFORE_VOTE",
        "pass",
        "Ctrl-C between the first all-reduce and the vote is forgiven",
        ("unit/test_interrupted.py::test_synchronization_without_known_outcome_is_the_last",),
    ),
    Change(
        "local_sgd.py",
        "self._reject(error)\n",
        "pass\n",
        "after an exception the next synchronization pairs old collectives with new ones",
        ("unit/test_interrupted.py::test_exception_before_the_vote_votes_no_and_passes",),
    ),
    Change(
        "local_sgd.py",
        "self._manager.report_error(error)",
        "pass",
        "a group that failed votes yes",
        ("unit/test_interrupted.py::test_exception_before_the_vote_votes_no_and_passes",),
    ),
    Change(
        "local_sgd.py",
        "self._manager.wait_quorum()",
        "pass",
        "the vote of a group that failed while it heals drops the state and keeps its step",
        (
            "unit/test_interrupted.py",
            "faults/test_fault_healing.py::test_no_memory_while_an_asynchronous_quorum_heals",
        ),
    ),
    Change(
        "local_sgd.py",
        "self._manager.should_commit()\n        except Exception:",
        "pass\n        except Exception:",
        "after an exception the next synchronization pairs old collectives with new ones",
        ("unit/test_interrupted.py::test_exception_before_the_vote_votes_no_and_passes",),
    ),
    Change(
        "local_sgd.py",
        "else:\n            self._outcome.at = None",
        "finally:\n            self._outcome.at = None",
        "a vote that failed after an exception is forgiven: the next synchronization may commit wrong values",
        ("unit/test_outcome.py::test_vote_that_fails_in_the_failure_path_is_not_forgiven",),
    ),
    Change(
        "local_sgd.py",
        "self._outcome.committed()",
        "pass",
        "a healthy run is told of many rejections in a row",
        ("unit/test_rejections.py::test_a_commit_starts_the_count_again",),
    ),
    Change(
        "local_sgd.py",
        "checks.check_backend(failure_of(self._manager), self._allreduce_to_cpu)",
        "pass",
        "training goes on alone where the process group can't take the parameters",
        ("unit/test_rejections.py::test_group_that_cannot_take_the_device_is_an_error_after_a_rejection",),
    ),
    Change(
        "_staging/buffers.py",
        "if index in self.plan.offsets:\n",
        "if False:\n",
        "copying what is not dense to the host takes device memory",
        ("unit/test_properties.py::test_property",),
    ),
    Change(
        "_staging/buffers.py",
        "self._windows.clear()\n        self.host.clear()",
        "pass\n        self.host.clear()",
        "whoever holds the buffers of the last synchronization keeps M on the device",
        (
            "unit/test_interrupted.py",
            "unit/test_subclasses.py",
        ),
    ),
    Change(
        "_staging/buffers.py",
        "        self.host.clear()",
        "        pass",
        "whoever holds the buffers of the last synchronization keeps S on the host",
        (
            "unit/test_interrupted.py",
            "unit/test_subclasses.py",
        ),
    ),
    Change(
        "_staging/buffers.py",
        "return self.slot(index).copy_(average)",
        "return average.to(self.plan.layouts[index].device)",
        "memory is taken on the device after the vote: running out of it tears the model",
        ("unit/test_subclasses.py::test_memory_bound_of_subclasses",),
    ),
    Change(
        "_staging/plan.py",
        "offset = -(-used.get(layout.device, 0) // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT",
        "offset = used.get(layout.device, 0)",
        "slots are not aligned: kernels fail or are slow",
        ("unit/test_plan.py::test_slots_of_a_round_are_aligned_and_apart",),
    ),
    Change(
        "_staging/plan.py",
        "if not shard.is_contiguous():",
        "if False:",
        "a strided shard takes more memory than it has elements",
        ("unit/test_plan.py::test_layout_is_that_of_clone",),
    ),
    Change(
        "_staging/plan.py",
        "torch.empty_like(like_shard).stride()",
        'torch.empty(shard.shape, device="meta").stride()',
        "transposed parameters are averaged with others beside a group of the release",
        ("unit/test_plan.py::test_layout_is_that_of_clone",),
    ),
    Change(
        "_staging/plan.py",
        "max(window_bytes, largest[layout.device])",
        "window_bytes",
        "a parameter is alone in its round though M has room",
        ("unit/test_plan.py::test_rounds_keep_order_and_fit",),
    ),
    Change(
        "_staging/plan.py",
        "or window_bytes is None\n",
        "",
        "without a window several parameters are in flight",
        ("unit/test_plan.py::test_rounds_keep_order_and_fit",),
    ),
    Change(
        "_staging/plan.py",
        "used, offset = {}, 0",
        "offset = 0",
        "parameters of one round share memory",
        (
            "unit/test_plan.py::test_rounds_keep_order_and_fit",
            "unit/test_plan.py::test_slots_of_a_round_are_aligned_and_apart",
        ),
    ),
    Change(
        "_staging/plan.py",
        "not layout.dense and layout.device.type",
        "layout.device.type",
        "a host all-reduce has a window of M for what is dense",
        ("unit/test_subclasses.py::test_memory_bound_of_subclasses",),
    ),
    Change(
        "_staging/plan.py",
        "dict.fromkeys(strided, 0)",
        "{}",
        "copying what is not dense takes device memory, after the vote as well",
        ("unit/test_properties.py::test_property",),
    ),
    Change(
        "_staging/checks.py",
        "or torch.finfo(dtype).bits < 16",
        "",
        "8-bit floats are found out when the Manager divides",
        ("unit/test_bad_input.py::test_dtype_without_average",),
    ),
    Change(
        "_staging/checks.py",
        "if any(size > 1 and stride == 0",
        "if any(size < 0 and stride == 0",
        "an expanded parameter is found out in the middle of write-back",
        ("unit/test_bad_input.py::test_expanded_parameter",),
    ),
    Change(
        "_staging/checks.py",
        "if len(names) == 1 else None",
        "if len(names) > 0 else None",
        "a tensor with a scale beside it is averaged without the scale",
        ("unit/test_tensor_subclasses.py::test_tensor_of_several_is_refused_at_construction",),
    ),
    Change(
        "_staging/checks.py",
        "if (tuple(shard.shape), shard.dtype) != (layout.shape, layout.dtype):",
        "if shard.dtype != layout.dtype:",
        "a parameter of another shape tears the model",
        ("unit/test_outcome.py::test_parameters_that_changed_in_the_vote_are_not_written",),
    ),
    Change(
        "_staging/checks.py",
        "if (tuple(shard.shape), shard.dtype) != (layout.shape, layout.dtype):",
        "if tuple(shard.shape) != layout.shape:",
        "a parameter of another dtype gets rounded values",
        ("unit/test_outcome.py::test_parameters_that_changed_in_the_vote_are_not_written",),
    ),
    Change(
        "_staging/checks.py",
        "if tuple(average.shape) != layout.shape:",
        "if False:",
        "a subclass's average of another shape is spread over the parameter, or tears the model",
        ("unit/test_outcome.py::test_averages_of_a_subclass_that_do_not_fit",),
    ),
    Change(
        "_staging/checks.py",
        "unsharded = find_unsharded(model, parameters)",
        "unsharded = None",
        "averages are written into unsharded parameters and lost",
        ("unit/test_unsharded.py::test_made_while_unsharded",),
    ),
    Change(
        "_staging/fsdp.py",
        "for module, reference in list(_module_state_mapping.items()):",
        "for module, reference in ():",
        "averages are written into FSDP2's unsharded parameters and lost",
        ("unit/test_unsharded.py",),
    ),
    Change(
        "_staging/fsdp.py",
        "if group.is_sharded:\n                continue",
        "if False:\n                continue",
        "sharded parameters are refused",
        (
            "unit/test_unsharded.py::test_made_while_unsharded",
            "unit/test_unsharded.py",
        ),
    ),
    Change(
        "_staging/fsdp.py",
        '("_unsharded_param", "_sharded_post_forward_param")',
        '("_unsharded_param",)',
        "with reshard_after_forward=N averages are written into shards that are dropped",
        ("unit/test_unsharded.py",),
    ),
    Change(
        "_staging/fsdp.py",
        '("_unsharded_param", "_sharded_post_forward_param")',
        '("_sharded_post_forward_param",)',
        "averages are written into FSDP2's unsharded parameters and lost",
        ("unit/test_unsharded.py",),
    ),
    Change(
        "_staging/fsdp.py",
        "if handle is None or not handle.uses_sharded_strategy or",
        "if handle is None or",
        "FSDP1 without sharding is refused for ever",
        ("unit/test_unsharded.py",),
    ),
    Change(
        "_staging/fsdp.py",
        'if getattr(handle, "_unsharded_flat_param_for_skipped_views", None) is not None:',
        "if False:",
        "after a validation under FSDP1 averages are lost",
        ("unit/test_unsharded.py",),
    ),
    Change(
        "_staging/fsdp.py",
        "tensor.untyped_storage().nbytes() > 0",
        "False",
        "after a forward pass under FSDP1 averages are lost",
        ("unit/test_unsharded.py",),
    ),
    Change(
        "_staging/outcome.py",
        "done = not isinstance(future, Future) or future.done()",
        "done = True",
        "an alarm while the quorum goes on is forgiven: stale weights are averaged",
        ("unit/test_outcome.py::test_exception_in_the_quorum",),
    ),
    Change(
        "_staging/outcome.py",
        'return done and getattr(manager, "_healing", None) is not True',
        "return done",
        "an exception while this group heals is forgiven: it has a peer's step without its state",
        ("unit/test_outcome.py::test_exception_in_the_quorum",),
    ),
    Change(
        "_staging/outcome.py",
        '"""Notes a commit."""\n        self._rejections = 0',
        '"""Notes a commit."""\n        pass',
        "a healthy run is told of many rejections in a row",
        ("unit/test_rejections.py::test_a_commit_starts_the_count_again",),
    ),
    Change(
        "_staging/outcome.py",
        "if self._rejections < _MANY:",
        "if True:",
        "a run that never commits is not told what usually is wrong",
        ("unit/test_rejections.py::test_the_third_in_a_row_says_since_when_and_what_usually_is_wrong",),
    ),
    Change(
        "_staging/frames.py",
        "pending += [link.__cause__, link.__context__]",
        "pending += [link.__cause__]",
        "an exception raised while another one was handled keeps the window",
        ("unit/test_interrupted.py::test_held_chain_of_exceptions_holds_no_buffers",),
    ),
    Change(
        "_staging/frames.py",
        "pending += [link.__cause__, link.__context__]",
        "pending += [link.__context__]",
        "an exception raised from another one keeps the window",
        ("unit/test_interrupted.py",),
    ),
    Change(
        "_staging/frames.py",
        "frame = trace.tb_frame.f_back if trace is not None else None",
        "frame = None",
        "frames that called into a failed collective keep the window",
        ("unit/test_interrupted.py",),
    ),
    Change(
        "_staging/frames.py",
        "if frame.f_code.co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR):",
        "if False:",
        "a generator that saw the exception, a watchdog say, ends",
        ("unit/test_interrupted.py::test_dropping_locals_ends_no_suspended_generator",),
    ),
    Change(
        "_staging/frames.py",
        "_ = frame.f_locals",
        "pass",
        "a debugger or a log handler that reads locals keeps M on the device",
        ("unit/test_interrupted.py::test_several_kept_failures_hold_no_memory",),
    ),
    Change(
        "_staging/ordering.py",
        "return torch.accelerator.device_index(device.index)",
        "return nullcontext()",
        "on CUDA, of parameters on another than the current device undivided sums are staged",
        ("unit/test_local_sgd_ordering.py::test_averages_are_divided",),
    ),
    Change(
        "_staging/ordering.py",
        "if device.type not in _ORDERED_BY_WAIT:",
        "if True:",
        "each round waits for whatever else is in flight on the device",
        ("unit/test_local_sgd_ordering.py::test_devices_that_wait_orders_are_not_synchronized",),
    ),
    Change(
        "_staging/ordering.py",
        "if device.type not in _ORDERED_BY_WAIT:",
        "if False:",
        "on accelerators that TorchFT has no streams for undivided sums are staged",
        ("unit/test_local_sgd_ordering.py::test_devices_that_wait_orders_are_not_synchronized",),
    ),
    Change(
        "_staging/steps.py",
        "return steps > 1",
        "return False",
        "a step inside a step counts: synchronized in the middle of a step",
        ("unit/test_optimizers.py::test_step_inside_a_step_does_not_count",),
    ),
    Change(
        "_staging/steps.py",
        'frame.f_locals.get("self") is optimizer',
        "True",
        "an optimizer that another one steps never synchronizes",
        ("unit/test_optimizers.py::test_optimizer_inside_another_one_counts",),
    ),
    Change(
        "_staging/host_memory.py",
        "return max(0, min(available))",
        "return max(0, available[0])",
        "in a container the process is killed without a warning",
        ("unit/test_memory_host.py::test_available_host_memory",),
    ),
    Change(
        "_staging/host_memory.py",
        "if available is None or bytes_per_rank * ranks <= available:",
        "if available is None or bytes_per_rank <= available:",
        "eight ranks of a host run out of memory together without a warning",
        ("unit/test_memory_host.py::test_shortage_names_what_is_needed_and_missing",),
    ),
    Change(
        "_staging/report.py",
        ' and process_group == "torchft-gloo"',
        "",
        "users of NCCL are told to reduce on the host",
        ("unit/test_log.py",),
    ),
]
