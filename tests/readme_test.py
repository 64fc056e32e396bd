"""README's results are those of the committed files."""

import pytest

from experiments.papers import readme_blocks

FILE = '# Title\n\ntop\n\n## Table\n\n| a |\n| --- |\n| 1 |\n\n## Rest\n\nno\n'
BLOCK = '''before
<!-- results: found/table.md#Table
python -m experiments.flops --table=spdf \\
  --inference -->
{}<!-- end -->
after
'''
FILLED = '''| a |
| --- |
| 1 |

```sh
python -m experiments.flops --table=spdf \\
  --inference
```
'''


@pytest.fixture
def root(tmp_path):
  (tmp_path / 'found').mkdir()
  (tmp_path / 'found' / 'table.md').write_text(FILE)
  return tmp_path


def test_readme_shows_what_the_committed_files_say():
  text = (readme_blocks.ROOT / 'README.md').read_text()
  assert readme_blocks.fill(text) == text, 'run python -m experiments.readme'


@pytest.mark.parametrize(
    'old', ['', 'old\n', FILLED], ids=['empty', 'old', 'filled']
)
def test_a_block_is_its_section_and_the_command(root, old):
  assert readme_blocks.fill(BLOCK.format(old), root) == BLOCK.format(FILLED)


def test_blocks_are_filled_one_by_one(root):
  text = BLOCK.format('') + BLOCK.format('old\n').replace('#Table', '')
  filled = readme_blocks.fill(text, root)
  assert filled.startswith(BLOCK.format(FILLED))
  assert FILE.strip() in filled and 'old' not in filled
  assert readme_blocks.fill(filled, root) == filled


@pytest.mark.parametrize('old, new, message', [
    ('table.md', 'tables.md', 'found/tables.md is missing; write it with: py'),
    ('#Table', '#Tabel', "heading of table.md 'Tabel' is .*'Table'"),
    ('<!-- end', '<!-- and', 'a block of results is incomplete; give it'),
    (' -->\n<', '\n<', 'a block of results is incomplete; give it'),
])
def test_a_block_that_cannot_be_filled_is_one_sentence(
    root, old, new, message
):
  with pytest.raises(ValueError, match=message):
    readme_blocks.fill(BLOCK.format('').replace(old, new), root)


def test_the_blocks_of_a_file_are_filled_in_place(root):
  (root / 'README.md').write_text(BLOCK.format('old\n'))
  readme_blocks.fill_file('README.md', root)
  assert (root / 'README.md').read_text() == BLOCK.format(FILLED)
