"""Settings of the nbgrader command, for who calls it directly: `cd labs && nbgrader …`.

`make labs` and `make grade` take the same settings from labcore. What nbgrader writes, the
gradebook too, goes below `labs/grading/`, which git ignores: submissions are expected in
`labs/grading/submitted/<student>/<slug>/<slug>.ipynb`.
"""

from pathlib import Path

from labcore.labs.nbgrader_settings import course_settings, open_gradebook

LABS = Path(__file__).resolve().parent
(LABS / "grading").mkdir(exist_ok=True)
open_gradebook(LABS / "grading")
c = get_config()  # noqa: F821 - given by nbgrader
for name, settings in course_settings(LABS, LABS / "grading").items():
    c[name].update(settings)
