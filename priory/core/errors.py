"""The one exception for what a user can mend."""


class UsageError(ValueError):
    """A value the user chose breaks a rule; the message names the value, the rule and the remedy.

    The command line prints the message as one sentence and exits with code 2.
    """
