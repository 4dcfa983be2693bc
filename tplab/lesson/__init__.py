"""What an exercise needs: checks that say what is wrong, the panel of faults, failures on purpose."""

from tplab import lazy

_HOMES = {"ask": ".answers", "default_question": ".answers", "judge": ".verdict", "fused_copy": ".altered",
          "shown_error": ".incidents", "default_prompt": ".answers",
          "side_by_side": "tplab.show.code",
          "panel": ".fault_panel", "Incidents": ".incidents", "caught": ".incidents", "error_text": ".incidents",
          "available_cores": "tplab.pool",
          "ContiguousKVCache": "tplab.cache", "with_cures": ".patient", "all_exercises": ".verdict",
          "changed_config": ".altered", "progress": ".progress_file", "clear_progress": ".progress_file",
          "own_pieces": ".own_engine", "your_engine": ".own_engine", "open_case": ".cases.sealed",
          "prove_cases": ".cases.proof", "written": ".own_engine"}
__all__ = list(_HOMES)
__getattr__ = lazy(__name__, _HOMES)
