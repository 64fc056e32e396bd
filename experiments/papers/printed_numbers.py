"""Printed numbers: parsing them, and formatting numbers in the same way."""

import re

_NUMBER = re.compile(
    r'(?P<sign>[~<]?)(?P<digits>\d+(?:\.(?P<decimals>\d+))?)'
    r'(?:e(?P<power>\d+))?(?P<unit>[xMB%]?)'
)
_UNITS = {'': 1.0, 'x': 1.0, '%': 1e-2, 'M': 1e6, 'B': 1e9}


def value_of(text: str) -> float:
  """Returns the value of a printed number.

  Args:
    text: Digits, with an exponent or a unit: x, %, M or B.

  Returns:
    The value; percentages are divided by 100.

  Raises:
    ValueError: `text` has another form.

  Example:
    >>> value_of('1.22e6'), value_of('75%'), value_of('~26B')
    (1220000.0, 0.75, 26000000000.0)
  """
  found = _parse(text)
  digits = f'{found["digits"]}e{found["power"] or 0}'
  unit = found['unit']
  return float(digits) / 100 if unit == '%' else float(digits) * _UNITS[unit]


def as_printed(value: float, text: str) -> str:
  """Formats a number with the digits, exponent and unit of a printed one.

  Args:
    value: The number.
    text: The printed number.

  Returns:
    The number, rounded to as many digits as `text`; `text` itself if it begins
    with `<` and the number is less.

  Example:
    >>> as_printed(54_321, '0.54e5'), as_printed(0.6416, '64%')
    ('0.54e5', '64%')
    >>> as_printed(0.0002, '<0.05%'), as_printed(0.0007, '<0.05%')
    ('<0.05%', '0.07%')
  """
  found = _parse(text)
  if found['sign'] == '<' and value < value_of(text):
    return text
  scale = _UNITS[found['unit']] * 10.0 ** int(found['power'] or 0)
  digits = len(found['decimals'] or '')
  power = f'e{found["power"]}' if found['power'] else ''
  sign = found['sign'].replace('<', '')
  return f'{sign}{value / scale:.{digits}f}{power}{found["unit"]}'


def _parse(text: str) -> re.Match[str]:
  found = _NUMBER.fullmatch(text)
  if found is None:
    raise ValueError(
        f'{text!r} is not a printed number, such as 1.22e6, 75% or 2.5B.'
    )
  return found
