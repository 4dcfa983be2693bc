"""Looks at a learner's answer: runs it on examples, says what is wrong, then patches it into the engine."""
