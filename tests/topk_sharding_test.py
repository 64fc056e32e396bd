"""Top-k of sharded arrays: no gather, few bytes exchanged, the same masks.

On 8 simulated devices, in a process of their own.
"""

import json
import math
import re
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.sharding

CODE = textwrap.dedent('''
    import json
    import jax
    jax.config.update('jax_num_cpu_devices', 8)
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P
    import spdf_jax as spdf
    from spdf_jax.sparsity import structures
    from spdf_jax.sparsity import topk
    from spdf_jax.sparsity.distributions import ModelWide

    mesh = jax.make_mesh((8,), ('x',), axis_types=(AxisType.Auto,))
    key = jax.random.key(1)
    INPUTS, OUTPUTS = P(None, 'x', None), P(None, None, 'x')

    def run(name, f, *arguments, spec):
      """Prints what a program exchanges, and whether masks are the same."""
      if not isinstance(spec, list):
        spec = [spec] * len(arguments)
      sharded = [
          jax.device_put(x, NamedSharding(mesh, s))
          for x, s in zip(arguments, spec)
      ]
      program = jax.jit(f).lower(*sharded).compile()
      eight = jax.block_until_ready(program(*sharded))
      one = jax.block_until_ready(f(*arguments))
      scores = [x for x in arguments if x.dtype == jnp.float32]
      shard = sum(x.nbytes for x in scores) / 8
      print(json.dumps(dict(
          name=name,
          layers=sum(x.shape[0] for x in scores),
          text=program.as_text(),
          scratch=program.memory_analysis().temp_size_in_bytes,
          shard=shard,
          same=all(map(np.array_equal, jax.tree.leaves(one),
                       jax.tree.leaves(eight))),
          stays=all(
              out.is_equivalent_to(x.sharding, 3) for out, x in
              zip(jax.tree.leaves(program.output_shardings), sharded)),
      )), flush=True)

    def scores_of(layers, seed=0):
      normal = np.random.default_rng(seed).standard_normal((layers, 512, 1024))
      return jnp.asarray(np.round(8 * normal), jnp.float32)

    KEPT = 100_000
    plain = lambda s, a: topk.keep_largest(s, KEPT)
    among_ties = lambda s, a: topk.keep_largest(s, KEPT, among=a, tie_break=key)
    among = lambda s, a: topk.keep_largest(s, KEPT, among=a)
    ties = lambda s, a: topk.keep_largest(s, KEPT, tie_break=key)
    random = lambda s, a: topk.keep_random(key, s.shape, KEPT, among=a)
    for name, f, layers, spec in (
        ('plain, inputs', plain, 1, INPUTS),
        ('plain, outputs', plain, 1, OUTPUTS),
        ('among, inputs', among, 3, INPUTS),
        ('ties, inputs', ties, 3, INPUTS),
        ('among and ties, outputs', among_ties, 3, OUTPUTS),
        ('random, outputs', random, 3, OUTPUTS),
    ):
      scores = scores_of(layers)
      chosen = jnp.asarray(np.random.default_rng(1).random(scores.shape) < 0.5)
      run(name, f, scores, chosen, spec=spec)

    # As tensor parallelism shards them: equal shapes, different axes. Scratch
    # is that of a leaf of each kind, beside six leaves.
    def tree(square, *queries):
      layers = {f'query_{i}': q for i, q in enumerate(queries)}
      return layers | {'a_square': square}

    six = [scores_of(1, seed) for seed in range(6)]
    specs = [INPUTS] + 5 * [OUTPUTS]
    run('leaves', lambda *s: spdf.mask_from_scores(tree(*s), 0.75),
        *six, spec=specs)
    run('model', lambda *s: spdf.mask_from_scores(
        tree(*s), ModelWide(0.75), tie_break=key), *six, spec=specs)
    for name, s, sparsity, spec in (
        ('2:4', structures.n_of_m(2, 4), 0.5, INPUTS),
        ('2:4', structures.n_of_m(2, 4), 0.5, OUTPUTS),
        ('16 heads', structures.balanced(16), 0.75, OUTPUTS),
        ('blocks', structures.block(4, 4), 0.75, INPUTS),
    ):
      run(f'{name}, {spec}', lambda x, s=s, sparsity=sparsity:
          spdf.mask_from_scores(x, sparsity, structure=s), scores_of(3),
          spec=spec)
''')
WIDTHS = {'pred': 1, 'u8': 1, 's8': 1, 'u16': 2, 'bf16': 2, 'f16': 2}


def exchanged(text, kind):
  """Yields the bytes of every collective of a kind, over all its runs."""
  bodies = {}
  for match in re.finditer(
      r'^(?:ENTRY )?%(\S+) \(.*?\{\n(.*?)^\}', text, re.M | re.S
  ):
    bodies[match[1]] = match[2]
  times = {}

  def visit(name, runs):
    times[name] = max(times.get(name, 0), runs)
    for line in bodies.get(name, '').splitlines():
      count = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
      loop = int(count[1]) if count else 1
      for inner in re.findall(r'%([\w.-]+)', line.partition(' = ')[2]):
        if inner in bodies:
          visit(inner, runs * loop)

  visit(re.search(r'^ENTRY %(\S+)', text, re.M)[1], 1)
  for name, body in bodies.items():
    for types in re.findall(rf'= (.*?) {kind}(?:-start)?\(', body):
      for dtype, shape in re.findall(r'(\w+)\[([\d,]*)\]', types):
        sizes = [int(n) for n in shape.split(',') if n]
        yield times.get(name, 1) * WIDTHS.get(dtype, 4) * math.prod(sizes)


@pytest.fixture(scope='module')
def programs():
  done = subprocess.run(
      [sys.executable, '-c', CODE],
      capture_output=True, text=True, timeout=600, check=False,
  )
  assert done.returncode == 0, done.stderr
  return [json.loads(line) for line in done.stdout.splitlines()]


def test_masks_are_the_same_on_eight_devices(programs):
  assert len(programs) == 12
  assert [p['name'] for p in programs if not p['same']] == []


def test_nothing_is_gathered(programs):
  for program in programs:
    for kind in ('all-gather', 'all-to-all', 'collective-permute'):
      assert not list(exchanged(program['text'], kind)), program['name']


def test_at_most_64_kilobytes_are_summed_per_layer(programs):
  for program in programs:
    summed = sum(exchanged(program['text'], 'all-reduce'))
    assert summed <= 2**16 * program['layers'], (program['name'], summed)
    # Every group of 4 inputs is on one device; the others exchange.
    alone = program['name'].startswith('2:4')
    assert summed <= 4 if alone else summed > 0, (program['name'], summed)


def test_scratch_is_at_most_three_times_the_shard(programs):
  for program in programs:
    # But for the bins, which are large beside these small shards.
    bound = 3 * program['shard'] + 2**15
    assert program['scratch'] <= bound, (program['name'], program['scratch'])


def test_masks_stay_where_the_scores_are(programs):
  for program in programs:
    assert program['stays'], program['name']
