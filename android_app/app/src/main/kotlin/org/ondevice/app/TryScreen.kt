package org.ondevice.app

import android.os.Bundle
import android.text.InputType
import android.view.View
import android.widget.EditText
import android.widget.Spinner
import org.ondevice.core.ArtifactInfo
import org.ondevice.core.Format
import org.ondevice.core.Session
import org.ondevice.core.Task
import org.ondevice.core.Tasks
import org.ondevice.core.Trial
import org.ondevice.core.TrialResult
import org.ondevice.core.TrialSide

/** One prompt, answered by the model as it came and by the model as it was trained. */
class TryScreen(host: MainActivity) : Screen(host) {
    private val watcher: () -> Unit = { render() }
    private val draft = Bundle()

    private var blocked = false

    /** Training that begins or ends opens or closes the comparison; its steps do not matter here. */
    private val runWatcher: () -> Unit = { if (blocked != app.runs.isWorking) render() }

    override fun onShow() {
        app.jobs.watch(watcher)
        app.runs.watch(runWatcher)
    }

    override fun onHide() {
        keepDraft()
        app.jobs.unwatch(watcher)
        app.runs.unwatch(runWatcher)
    }

    override fun save(state: Bundle) {
        keepDraft()
        state.putAll(draft)
    }

    override fun restore(state: Bundle) {
        draft.putAll(state)
    }

    private fun keepDraft() {
        root.findViewById<EditText>(R.id.prompt)?.let { draft.putString("prompt", it.text.toString()) }
        root.findViewById<EditText>(R.id.answers)?.let { draft.putString("answers", it.text.toString()) }
        root.findViewById<Spinner>(R.id.adapter)?.let { draft.putString("adapter", it.selectedItem?.toString()) }
        root.findViewById<Spinner>(R.id.model)?.let { draft.putString("model", it.selectedItem?.toString()) }
    }

    override fun content(): View {
        keepDraft()
        val parts = arrayListOf<View>(ui.title(string(R.string.tab_try)))
        val models = app.store.models().filter { it.manifest != null }
        if (models.isEmpty()) {
            parts += ui.empty(R.string.no_models, R.string.no_models_words)
            parts += ui.button(R.string.go_models, Tone.PRIMARY) { host.open(0) }
            return ui.page(R.id.page_try, *parts.toTypedArray())
        }
        val model = models.firstOrNull { it.name == draft.getString("model") } ?: models[0]
        val adapters = app.store.adapters(model.artifact!!)
        val names = adapters.list().filter { it.problem == null }.map { it.name }
        val form = ArrayList<View>()
        if (models.size > 1) form += ui.labelled(R.string.model, ui.spinner(R.id.model, models.map { it.name }, models.indexOf(model), ::otherModel))
        if (names.isEmpty()) {
            if (form.isNotEmpty()) parts += ui.card(*form.toTypedArray())
            parts += ui.empty(R.string.no_adapter_to_try, R.string.no_adapter_to_try_words)
            parts += ui.button(R.string.go_train, Tone.PRIMARY) { host.openTrain() }
            return ui.page(R.id.page_try, *parts.toTypedArray())
        }
        val wanted = draft.getString("adapter")?.takeIf { it in names } ?: adapters.activeName()
        form += ui.labelled(R.string.adapter, ui.spinner(R.id.adapter, names, names.indexOf(wanted)))
        val writes = Session.NEXT_TOKEN in model.manifest!!.spec.methods
        val task = task(model)
        val label = if (task != null) R.string.text_to_judge else R.string.prompt
        val prompt = ui.field(R.id.prompt, label, InputType.TYPE_CLASS_TEXT, lines = 2).apply { setText(draft.getString("prompt") ?: "") }
        form += ui.labelled(label, prompt)
        if (task != null) {
            form += ui.soft(string(R.string.asks_task, task.prompt.replace(Regex("\\{\\w+\\}"), "…"), task.choices.joinToString { it.answer.trim() }))
        } else if (!writes) {
            val answers = ui.field(R.id.answers, R.string.answers, InputType.TYPE_CLASS_TEXT, lines = 2).apply { setText(draft.getString("answers") ?: "") }
            form += ui.labelled(R.string.answers, answers)
        }
        parts += ui.card(*form.toTypedArray(), gap = 10)
        blocked = app.runs.isWorking
        if (blocked) parts += ui.notice(string(R.string.try_while_training))
        app.jobs.error(PLACE)?.let { parts += ui.problem(it) }
        val busy = app.jobs.words(PLACE)
        if (busy != null) parts += ui.busy(busy)
        val compare = ui.button(R.string.compare, Tone.PRIMARY) { compare(models) }.apply { id = R.id.compare }
        ui.enable(compare, !blocked && busy == null)
        parts += compare
        app.lastTrial?.let { parts += sides(it) }
        return ui.page(R.id.page_try, *parts.toTypedArray())
    }

    /** Another model has other adapters and may ask otherwise. */
    private fun otherModel() {
        app.lastTrial = null
        app.jobs.dismiss(PLACE)
        render()
    }

    /** The artifact's task if one text is all that it asks about. */
    private fun task(model: ArtifactInfo): Task? =
        model.manifest?.task?.let { name -> Tasks.ALL.values.firstOrNull { it.name == name } }
            ?.takeIf { it.kind == Format.CLASSIFICATION && it.columns.size == 1 }

    private fun compare(models: List<ArtifactInfo>) {
        keepDraft()
        val model = models.firstOrNull { it.name == draft.getString("model") } ?: models[0]
        val adapter = draft.getString("adapter") ?: return
        val prompt = draft.getString("prompt") ?: ""
        val task = task(model)
        app.lastTrial = null
        app.jobs.run(PLACE, string(R.string.comparing), {
            val artifact = app.store.open(model.name)
            val vector = app.store.adapters(artifact).load(adapter)
            app.openProgram(artifact).use { program ->
                val trial = Trial(Session(artifact, program), artifact.tokenizer())
                if (trial.canGenerate && task == null) {
                    trial.generate(prompt, vector)
                } else {
                    val (text, answers) = task?.let { trial.ofTask(mapOf(it.columns.values.first()[0] to prompt)) } ?: (prompt to answers(prompt))
                    trial.judge(text, answers, vector)
                }
            }
        }) { app.lastTrial = it }
    }

    /** One answer a line; each goes on where the prompt ends, so a space comes between. */
    private fun answers(prompt: String): List<String> {
        val gap = if (prompt.isEmpty() || prompt.last().isWhitespace()) "" else " "
        return (draft.getString("answers") ?: "").lines().map { it.trim() }.filter { it.isNotEmpty() }.map { gap + it }
    }

    private fun sides(result: TrialResult): View {
        val before = side(R.string.before, result.before)
        val after = side(R.string.after, result.after)
        return ui.row(before, after, gap = 10).apply {
            id = R.id.sides
            gravity = android.view.Gravity.TOP
            isBaselineAligned = false
            for (index in 0 until childCount) getChildAt(index).layoutParams.height = android.view.ViewGroup.LayoutParams.MATCH_PARENT
        }
    }

    private fun side(heading: Int, side: TrialSide): View {
        val parts = arrayListOf<View>(ui.heading(string(heading)))
        side.text?.let { parts += if (it.isEmpty()) ui.soft(string(R.string.wrote_nothing)) else ui.text(it, 15f) }
        for ((index, answer) in side.ranked.withIndex()) {
            val percent = string(R.string.percent, Words.number(answer.share * 100, 1))
            val bar = android.widget.ProgressBar(host, null, android.R.attr.progressBarStyleHorizontal).apply {
                max = 1000
                progress = Math.round(answer.share * 1000).toInt()
                progressTintList = android.content.res.ColorStateList.valueOf(ui.color(if (index == 0) R.color.accent else R.color.chart_soft))
                importantForAccessibility = View.IMPORTANT_FOR_ACCESSIBILITY_NO
            }
            val words = ui.text(answer.answer, 15f, bold = index == 0)
            parts += ui.column(words, bar, ui.soft(percent), gap = 0)
        }
        return ui.card(*parts.toTypedArray(), gap = 8)
    }

    companion object {
        const val PLACE = "try"
    }
}
