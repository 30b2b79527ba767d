"""The torch side of the contract: what every component's module is built from or called with."""

from tfkit.nn.checked import can_look as can_look
from tfkit.nn.checked import is_token as is_token
from tfkit.nn.checked import within as within
from tfkit.nn.context import Cache as Cache
from tfkit.nn.context import Context as Context
from tfkit.nn.context import Past as Past
from tfkit.nn.context import cache_of_layer as cache_of_layer
from tfkit.nn.context import cache_of_next as cache_of_next
from tfkit.nn.context import count_positions as count_positions
from tfkit.nn.context import update_cache as update_cache
from tfkit.nn.layers import Linear as Linear
from tfkit.nn.layers import Softmax as Softmax
from tfkit.nn.layers import StackedLinear as StackedLinear
from tfkit.nn.layers import Table as Table
from tfkit.nn.layers import is_scripting as is_scripting
from tfkit.nn.layers import is_untouched as is_untouched
from tfkit.nn.layers import linear as linear
from tfkit.nn.program import Program as Program
from tfkit.nn.program import Value as Value
from tfkit.nn.program import Written as Written
from tfkit.nn.program import recomputed as recomputed
from tfkit.nn.program import written_class as written_class
from tfkit.nn.program import written_forward as written_forward
from tfkit.nn.rearrange import Rearrange as Rearrange
from tfkit.nn.settings import named as named
from tfkit.nn.settings import settings as settings
