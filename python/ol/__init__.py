"""The course's workbench: hands out its catalogue and judges a learner's module.

It imports nothing of tinyllm: what is judged runs in a process of its own.
"""
