"""From a step in torch to kernels: trace, lanes, normal form, derivatives, schedule, text. See CONTRIBUTING.md."""
