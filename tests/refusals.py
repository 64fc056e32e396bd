"""Calls that are refused with an error of one sentence."""

import pytest


def refuse(message, call, *args, error=ValueError, **kwargs):
  """Asserts that a call raises one sentence that a pattern matches.

  Args:
    message: Regular expression that is searched for in the sentence.
    call: Function that is called.
    *args: Arguments of the call.
    error: Type of the exception, or several types.
    **kwargs: Keyword arguments of the call.
  """
  with pytest.raises(error, match=message) as caught:
    call(*args, **kwargs)
  text = str(caught.value)
  del caught  # It refers to this frame, and to files that the call has open.
  assert '\n' not in text and text.endswith(('.', '?')), text
