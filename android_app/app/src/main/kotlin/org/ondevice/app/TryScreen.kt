package org.ondevice.app

import android.os.Bundle
import android.text.InputType
import android.view.View
import android.widget.EditText
import android.widget.Spinner
import android.widget.Switch
import android.widget.TextView
import org.ondevice.core.Adapters
import org.ondevice.core.ArtifactInfo
import org.ondevice.core.Format
import org.ondevice.core.JudgedAnswer
import org.ondevice.core.OndeviceException
import org.ondevice.core.PackedAnswers
import org.ondevice.core.Sampling
import org.ondevice.core.Session
import org.ondevice.core.TaskField
import org.ondevice.core.TaskRecord
import org.ondevice.core.Trial
import org.ondevice.core.TrialResult
import org.ondevice.core.TrialSide

/** One prompt, answered by the model as it came, or with another adapter, and by the model as it was trained. */
class TryScreen(host: MainActivity) : Screen(host) {
    private val watcher: () -> Unit = { render() }
    private val draft = Bundle()

    private var blocked = false
    private val isBlocked get() = app.runs.isWorking || app.rounds.isWorking

    /** Views of the task's fields but the first, by the fields' names. */
    private val others = LinkedHashMap<String, EditText>()

    /** Views of the answers that are being written. */
    private val shown = ArrayList<TextView>()

    @Volatile private var stopping = false

    /** Training that begins or ends opens or closes the comparison; its steps do not matter here. */
    private val runWatcher: () -> Unit = { if (blocked != isBlocked) render() }

    override fun onShow() {
        app.jobs.watch(watcher)
        app.runs.watch(runWatcher)
        app.rounds.watch(runWatcher)
    }

    override fun onHide() {
        keepDraft()
        app.jobs.unwatch(watcher)
        app.runs.unwatch(runWatcher)
        app.rounds.unwatch(runWatcher)
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
        for ((name, view) in others) draft.putString(FIELD + name, view.text.toString())
        root.findViewById<EditText>(R.id.answers)?.let { draft.putString("answers", it.text.toString()) }
        root.findViewById<EditText>(R.id.stop_texts)?.let { draft.putString("stop_texts", it.text.toString()) }
        root.findViewById<Spinner>(R.id.adapter)?.let { draft.putString("adapter", it.selectedItem?.toString()) }
        root.findViewById<Spinner>(R.id.other)?.let { draft.putString("other", it.selectedItem?.toString()) }
        root.findViewById<Switch>(R.id.as_chat)?.let { draft.putBoolean("as_chat", it.isChecked) }
        for ((id, name) in NUMBERS) root.findViewById<EditText>(id)?.let { draft.putString(name, it.text.toString()) }
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
        form += ui.labelled(R.string.adapter, ui.spinner(R.id.adapter, names, names.indexOf(wanted), ::otherAdapter))
        val compared = listOf(string(R.string.base_model)) + names
        form += ui.labelled(R.string.compare_with, ui.spinner(R.id.other, compared, compared.indexOf(draft.getString("other"))))
        val writes = model.manifest!!.writes
        val problem = arrayListOf<View>()
        val task = (wanted ?: names[0]).let { name -> task(adapters, name) { problem += ui.problem(it) } }
        val chooses = task?.hasCandidates == true
        form += prompts(task.takeIf { chooses || writes })
        if (chooses) {
            form += ui.soft(asked(task!!))
        } else if (!writes) {
            val answers = ui.field(R.id.answers, R.string.answers, InputType.TYPE_CLASS_TEXT, lines = 2).apply { setText(draft.getString("answers") ?: "") }
            form += ui.labelled(R.string.answers, answers)
        } else {
            if (task == null || task.format == Format.TEXT) form += ui.toggle(R.id.as_chat, R.string.as_chat, draft.getBoolean("as_chat"), {})
            else form += ui.soft(string(R.string.asked_as_trained, task.framing.ifEmpty { task.format.formatName }))
            val longest = maxOf(32, task?.longestAnswerTokens ?: 0).toString()
            form += ui.row(number(R.id.longest, R.string.longest_answer, longest, whole = true), number(R.id.heat, R.string.sampling_temperature, "0"), gap = 10)
            form += ui.row(number(R.id.top_p, R.string.top_p, "1"), number(R.id.sampling_seed, R.string.seed, "0", whole = true), gap = 10)
            val stops = ui.field(R.id.stop_texts, R.string.stop_texts, InputType.TYPE_CLASS_TEXT, lines = 2).apply { setText(draft.getString("stop_texts") ?: "") }
            form += ui.labelled(R.string.stop_texts, stops)
        }
        parts += ui.card(*form.toTypedArray(), gap = 10)
        parts += problem
        blocked = isBlocked
        if (blocked) parts += ui.notice(string(R.string.try_while_training))
        app.jobs.error(PLACE)?.let { parts += ui.problem(it) }
        val busy = app.jobs.words(PLACE)
        if (busy != null) parts += ui.busy(busy)
        if (busy != null && writes && !chooses) {
            parts += ui.button(R.string.stop, Tone.DANGER) { stopping = true }.apply { id = R.id.stop }
        } else {
            val compare = ui.button(R.string.compare, Tone.PRIMARY) { compare(models) }.apply { id = R.id.compare }
            ui.enable(compare, !blocked && busy == null)
            parts += compare
        }
        shown.clear()
        app.lastTrial?.let { parts += sides(it, busy == null) }
        return ui.page(R.id.page_try, *parts.toTypedArray())
    }

    private fun number(id: Int, label: Int, first: String, whole: Boolean = false): View {
        val kind = InputType.TYPE_CLASS_NUMBER or if (whole) 0 else InputType.TYPE_NUMBER_FLAG_DECIMAL
        return ui.labelled(label, ui.field(id, label, kind).apply { setText(draft.getString(NUMBERS.getValue(id)) ?: first) })
    }

    /** What stands in the fields; what is no number is refused as one that is out of range. */
    private fun sampling(task: TaskRecord?): Sampling {
        fun text(id: Int, first: String) = draft.getString(NUMBERS.getValue(id))?.trim()?.replace(',', '.') ?: first
        return Sampling(
            text(R.id.longest, maxOf(32, task?.longestAnswerTokens ?: 0).toString()).toIntOrNull() ?: 0, text(R.id.heat, "0").toFloatOrNull() ?: -1f,
            text(R.id.top_p, "1").toFloatOrNull() ?: 0f, text(R.id.sampling_seed, "0").toLongOrNull() ?: 0L,
            (draft.getString("stop_texts") ?: "").lines().map { it.trim() }.filter { it.isNotEmpty() },
        )
    }

    /** Another model has other adapters and may ask otherwise. */
    private fun otherModel() {
        app.lastTrial = null
        app.jobs.dismiss(PLACE)
        render()
    }

    /** Another adapter may have been trained to do something else. */
    private fun otherAdapter() {
        app.jobs.dismiss(PLACE)
        render()
    }

    /** What the adapter was trained to do; null if nothing says so, or [tell] was told that the record is damaged. */
    private fun task(adapters: Adapters, name: String, tell: (OndeviceException) -> Unit): TaskRecord? = try {
        adapters.task(name)
    } catch (error: OndeviceException) {
        tell(error)
        null
    }

    /** A field for each thing that the task asks for, or one for a prompt. */
    private fun prompts(task: TaskRecord?): List<View> {
        others.clear()
        val fields = task?.fields ?: listOf(TaskField("prompt"))
        return fields.mapIndexed { index, field ->
            val only = if (task?.hasCandidates == true) R.string.text_to_judge else R.string.prompt
            val caption = if (fields.size == 1) string(only) else if (field.isList) string(R.string.one_a_line, field.name) else field.name
            val kept = draft.getString(if (index == 0) "prompt" else FIELD + field.name) ?: ""
            val view = ui.field(if (index == 0) R.id.prompt else View.generateViewId(), only, InputType.TYPE_CLASS_TEXT, lines = 2)
            view.hint = caption
            view.setText(kept)
            if (index > 0) {
                view.isSaveEnabled = false
                others[field.name] = view
            }
            ui.column(ui.soft(caption).apply { labelFor = view.id }, view, gap = 4)
        }
    }

    /** How a task with candidates asks, and what it chooses from. */
    private fun asked(task: TaskRecord): String {
        val answers = task.answers
        val prompt = (task.task?.prompt ?: "{text}\nLabel:").replace(Regex("\\{[^{}\n]*\\}"), "…").trim()
        return if (answers.isEmpty()) string(R.string.asked_as_trained, task.framing.ifEmpty { task.format.formatName })
        else string(R.string.asks_task, prompt, answers.joinToString())
    }

    private fun compare(models: List<ArtifactInfo>) {
        keepDraft()
        val model = models.firstOrNull { it.name == draft.getString("model") } ?: models[0]
        val adapter = draft.getString("adapter") ?: return
        val prompt = draft.getString("prompt") ?: ""
        val other = draft.getString("other")?.takeIf { it != string(R.string.base_model) }
        val asChat = draft.getBoolean("as_chat")
        val task = task(app.store.adapters(model.artifact!!), adapter) {}
        val chooses = task?.hasCandidates == true
        val values = task?.fields.orEmpty().withIndex().associate { (index, field) ->
            field.name to (if (index == 0) prompt else draft.getString(FIELD + field.name) ?: "")
        }
        val keep = { result: TrialResult -> app.lastTrial = ShownTrial(prompt, other, adapter, result) }
        app.lastTrial = null
        stopping = false
        app.jobs.run(PLACE, string(R.string.comparing), {
            val artifact = app.store.open(model.name)
            val adapters = app.store.adapters(artifact)
            val vector = adapters.load(adapter)
            val left = other?.let(adapters::load) ?: artifact.first(artifact.manifest.spec.adapter).floats()
            val packs = !chooses && artifact.answers != null
            (if (packs) app.openAnswers(artifact) else app.openProgram(artifact)).use { program ->
                val trial = Trial(Session(artifact, program), artifact.tokenizer(), if (packs) PackedAnswers(artifact, program) else null)
                if (chooses) {
                    trial.classify(task!!, values, vector, left)
                } else if (trial.canGenerate) {
                    val free = asChat && (task == null || task.format == Format.TEXT)
                    trial.generate(prompt, vector, left, free, sampling(task), task, values, shouldStop = { stopping }) { soFar ->
                        app.jobs.onMain {
                            keep(soFar)
                            written()
                        }
                    }
                } else {
                    trial.judge(prompt, answers(prompt), vector, left)
                }
            }
        }) { keep(it) }
    }

    /** The texts of now, in the views that are there; a new one when the second side begins. */
    private fun written() {
        val result = app.lastTrial?.result ?: return
        val texts = listOfNotNull(result.before.text, result.after?.text)
        if (shown.size != texts.size) render() else for ((view, text) in shown.zip(texts)) view.text = text
    }

    /** One answer a line; each goes on where the prompt ends, so a space comes between. */
    private fun answers(prompt: String): List<String> {
        val gap = if (prompt.isEmpty() || prompt.last().isWhitespace()) "" else " "
        return (draft.getString("answers") ?: "").lines().map { it.trim() }.filter { it.isNotEmpty() }.map { gap + it }
    }

    private fun sides(trial: ShownTrial, isOver: Boolean): View {
        val left = side(trial.left ?: string(R.string.before), trial, trial.result.before, isOver)
        val right = trial.result.after?.let { side(if (trial.left == null) string(R.string.after) else trial.right, trial, it, isOver) } ?: View(host)
        return ui.row(left, right, gap = 10).apply {
            id = R.id.sides
            gravity = android.view.Gravity.TOP
            isBaselineAligned = false
            for (index in 0 until childCount) getChildAt(index).layoutParams.height = android.view.ViewGroup.LayoutParams.MATCH_PARENT
        }
    }

    private fun side(heading: String, trial: ShownTrial, side: TrialSide, isOver: Boolean): View {
        val parts = arrayListOf<View>(ui.heading(heading))
        side.text?.let { text ->
            parts += if (text.isEmpty() && isOver) ui.soft(string(R.string.wrote_nothing)) else ui.text(text, 15f).also { shown += it }
        }
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
        val answer = side.text ?: side.ranked.firstOrNull()?.answer
        if (isOver && !answer.isNullOrEmpty()) parts += thumbs(trial.prompt, answer)
        return ui.card(*parts.toTypedArray(), gap = 8)
    }

    /** Up and down; the one that was given is marked, and is taken back by nothing but the other. */
    private fun thumbs(prompt: String, answer: String): View {
        val given = try {
            app.store.judged.of(prompt, answer)
        } catch (error: OndeviceException) { // said where it is written, and on the data screen
            null
        }
        val buttons = listOf(true, false).map { liked ->
            val label = if (liked) R.string.thumbs_up else R.string.thumbs_down
            ui.button(if (liked) "\uD83D\uDC4D" else "\uD83D\uDC4E", if (given == liked) Tone.PRIMARY else Tone.PLAIN) { judge(JudgedAnswer(prompt, answer, liked)) }.apply {
                setPadding(0, 0, 0, 0)
                contentDescription = string(if (given == liked) R.string.judged_so else R.string.judge, string(label), answer)
            }
        }
        return ui.row(*buttons.toTypedArray())
    }

    private fun judge(judged: JudgedAnswer) {
        try {
            app.store.judged.put(judged)
        } catch (error: OndeviceException) {
            app.jobs.fail(PLACE, error)
            return
        }
        render()
    }

    companion object {
        const val PLACE = "try"
        private const val FIELD = "field "

        /** Fields of numbers, and their names in the draft. */
        private val NUMBERS = mapOf(R.id.longest to "longest", R.id.heat to "heat", R.id.top_p to "top_p", R.id.sampling_seed to "seed")
    }
}
