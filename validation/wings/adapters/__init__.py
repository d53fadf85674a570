"""Adapters of frameworks: access to a step's losses, gradients, norm and names, and its claims.

A framework's users say ``pipeproof.megatron.validate`` and so on. Each framework's module has the same names:
``validate`` runs a step on ranks of pipeproof's, which trains inside ``observe``; ``check_step`` and ``record_step`` go
around one of a running job; ``imports`` goes around what imports the framework, which then runs without a GPU too.
Nothing of a framework is imported before one of them is called.

An ``Adapter`` fills in the contract for its users, and makes a ``FrameworkStep`` of what they have: the modules of this
rank, their names in the whole model, and callables that tell gradients, losses and the norm while the step is taken.
The module ``adapter`` makes all three kinds of check of it, so that another framework's is one class more. The wing
stands on ``whitebox`` for steps that pipeproof starts and on ``records`` for those of jobs; a step that is held against
itself is asked for as a ``StepExpectation``. Begin with ``adapter`` and ``step``, then one framework, DeepSpeed say.
"""

__all__ = ["adapter", "colossalai", "deepspeed", "megatron", "nanotron", "torchtitan", "transformers"]
