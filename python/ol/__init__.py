"""The course's workbench: hands a module out, judges a learner's file, and grades their tests.

It imports nothing of tinyllm: what is judged runs in processes of its own.  A module imports only
from below itself in this list.

    cli                     the command line, exit codes
    report                  how results look, for people and as JSON
    lint                    whether the course holds what it says
    guide                   status, hint, diff
    grading                 check and mutate
    desk                    all that judging takes, laid out for one command
    grader                  a suite on right solutions, then on wrong ones
    wheats                  the other right solutions
    mutants                 the wrong ones: pitfalls, and changes of the reference
    generator, workspace    mutmut's mutations; a learner's repository and `start`
    contract, runner        what a .pyi promises; jobs for warm workers
    stage, suite, verdicts  folders to judge in; tests by content; what is known already
    catalogue, worker       course.toml; the process that forks once per run
    inside/                 what runs in the judged processes themselves
"""
