"""Advice on the next kind of parallelism, and the fastest layouts that fit, computed from sizes alone.

A ``Job`` is a ``Transformer`` with a batch and a sequence; a ``Cluster`` is how many ``Accelerator`` there are. A
``Layout`` divides the ranks among tensor, context, pipeline, data and expert parallelism. ``footprint`` counts the
bytes of its fullest rank; ``step_time`` gives the seconds of its step, with the pipeline of its schedule from
``pipelined``. ``search`` tries every legal layout and keeps the fastest; ``path`` adds one kind of parallelism at a
time and says why.

No tensor is made and torch is never imported. The wing stands on schedules and costs of ``pipeline`` alone, asks for no
extension point, and writes its page by the templates of ``reports``. Begin with ``layout``, then ``path``. Figures of
models and devices are those that their makers publish; tests hold the times against runs that were published.
"""

from pipeproof.wings.advise.cluster import ACCELERATORS as ACCELERATORS
from pipeproof.wings.advise.cluster import GIB as GIB
from pipeproof.wings.advise.cluster import UNITS as UNITS
from pipeproof.wings.advise.cluster import Accelerator as Accelerator
from pipeproof.wings.advise.cluster import Cluster as Cluster
from pipeproof.wings.advise.cluster import accelerator_named as accelerator_named
from pipeproof.wings.advise.footprint import Footprint as Footprint
from pipeproof.wings.advise.layout import Job as Job
from pipeproof.wings.advise.layout import Layout as Layout
from pipeproof.wings.advise.layout import Recompute as Recompute
from pipeproof.wings.advise.page import Advice as Advice
from pipeproof.wings.advise.page import advice_page as advice_page
from pipeproof.wings.advise.path import Outcome as Outcome
from pipeproof.wings.advise.path import Step as Step
from pipeproof.wings.advise.path import find_path as find_path
from pipeproof.wings.advise.pipelined import stages_of as stages_of
from pipeproof.wings.advise.search import Allowed as Allowed
from pipeproof.wings.advise.search import Choice as Choice
from pipeproof.wings.advise.search import Found as Found
from pipeproof.wings.advise.search import find_layouts as find_layouts
from pipeproof.wings.advise.transformer import MODELS as MODELS
from pipeproof.wings.advise.transformer import Experts as Experts
from pipeproof.wings.advise.transformer import Transformer as Transformer
from pipeproof.wings.advise.transformer import model_named as model_named
from pipeproof.wings.advise.transformer import model_of_config as model_of_config
from pipeproof.wings.advise.words import describe_request as describe_request
from pipeproof.wings.advise.words import known as known
from pipeproof.wings.advise.words import tables as tables
