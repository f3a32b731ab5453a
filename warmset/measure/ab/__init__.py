"""Matched pairs: which of two configurations is faster, or that it cannot be said.

    plan -> leg (a fresh process) -> record (grows leg by leg) -> analysis -> report, plot
                                                                     |
                                                    statistics <- simulate

A *leg* is one fresh engine process that answers some prompts; a *pair* is two legs, one of each arm, one right after
the other on the same prompts. Knows no command line: `warmset.cli.ab` and `warmset.cli.ab_arms` turn texts into arms.
"""
