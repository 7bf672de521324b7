"""Adjoint -> GradientPlan: the kernels of the gradients."""

from ssdgen.plan.gradients.plans import gradient_plan

__all__ = ["gradient_plan"]
