package org.ondevice.app

import android.content.Context
import android.content.res.ColorStateList
import android.graphics.Typeface
import android.graphics.drawable.Drawable
import android.graphics.drawable.GradientDrawable
import android.graphics.drawable.InsetDrawable
import android.graphics.drawable.LayerDrawable
import android.graphics.drawable.RippleDrawable
import android.os.Build
import android.text.InputType
import android.view.Gravity
import android.view.View
import android.view.ViewGroup
import android.view.ViewGroup.LayoutParams.MATCH_PARENT
import android.view.ViewGroup.LayoutParams.WRAP_CONTENT
import android.widget.AdapterView
import android.widget.ArrayAdapter
import android.widget.Button
import android.widget.EditText
import android.widget.LinearLayout
import android.widget.ProgressBar
import android.widget.ScrollView
import android.widget.Spinner
import android.widget.Switch
import android.widget.TextView
import org.ondevice.core.OndeviceException

/** How loud a button or a notice is. */
enum class Tone { PRIMARY, PLAIN, DANGER, WARN }

/** Builders of the few kinds of views that the screens are made of. Sizes in dp, colours from the theme. */
class Ui(val context: Context) {
    fun dp(size: Int): Int = Math.round(size * context.resources.displayMetrics.density)

    fun sp(size: Float): Float = android.util.TypedValue.applyDimension(android.util.TypedValue.COMPLEX_UNIT_SP, size, context.resources.displayMetrics)

    fun color(id: Int): Int = context.getColor(id)

    fun shape(fill: Int, radius: Int, stroke: Int? = null): GradientDrawable = GradientDrawable().apply {
        cornerRadius = dp(radius).toFloat()
        setColor(color(fill))
        stroke?.let { setStroke(dp(1), color(it)) }
    }

    fun text(value: CharSequence, sp: Float = 15f, color: Int = R.color.text, bold: Boolean = false): TextView =
        TextView(context).apply {
            text = value
            textSize = sp
            setTextColor(color(color))
            setLineSpacing(0f, 1.15f)
            textAlignment = View.TEXT_ALIGNMENT_VIEW_START
            if (bold) typeface = Typeface.create("sans-serif-medium", Typeface.NORMAL)
        }

    fun title(value: CharSequence) = text(value, 24f, bold = true).also(::isHeading)

    fun heading(value: CharSequence) = text(value, 16f, bold = true).also(::isHeading)

    /** Screen readers go from heading to heading, from Android 9 on. */
    private fun isHeading(view: View) {
        if (Build.VERSION.SDK_INT >= 28) Heading28.mark(view)
    }

    fun soft(value: CharSequence) = text(value, 13f, R.color.text_soft)

    fun column(vararg children: View, gap: Int = 8): LinearLayout = LinearLayout(context).apply {
        orientation = LinearLayout.VERTICAL
        for ((index, child) in children.withIndex()) {
            addView(child, LinearLayout.LayoutParams(MATCH_PARENT, WRAP_CONTENT).apply { if (index > 0) topMargin = dp(gap) })
        }
    }

    /** Children side by side; those in [stretched] share the width that is left. */
    fun row(vararg children: View, stretched: Set<View> = children.toSet(), gap: Int = 8): LinearLayout =
        LinearLayout(context).apply {
            orientation = LinearLayout.HORIZONTAL
            gravity = Gravity.CENTER_VERTICAL
            for ((index, child) in children.withIndex()) {
                val shares = child in stretched
                val params = LinearLayout.LayoutParams(if (shares) 0 else WRAP_CONTENT, WRAP_CONTENT, if (shares) 1f else 0f)
                if (index > 0) params.marginStart = dp(gap)
                addView(child, params)
            }
        }

    fun card(vararg children: View, gap: Int = 8): LinearLayout = column(*children, gap = gap).apply {
        background = shape(R.color.surface, 14, R.color.outline)
        setPadding(dp(16), dp(14), dp(16), dp(14))
    }

    /** A screen's content: scrolls, keeps its place by [id], and is no wider than is easy to read. */
    fun page(id: Int, vararg children: View): ScrollView = ScrollView(context).apply {
        this.id = id
        isFillViewport = true
        clipToPadding = false
        val wide = context.resources.configuration.screenWidthDp
        val side = dp(maxOf(16, (wide - 680) / 2))
        val inside = column(*children, gap = 12).apply {
            setPadding(side, dp(16), side, dp(24))
            isFocusableInTouchMode = true // no field opens the keyboard before it is touched
            descendantFocusability = ViewGroup.FOCUS_BEFORE_DESCENDANTS
        }
        addView(inside)
    }

    fun button(label: Int, tone: Tone = Tone.PLAIN, onClick: (View) -> Unit): Button =
        button(context.getString(label), tone, onClick)

    fun button(label: CharSequence, tone: Tone = Tone.PLAIN, onClick: (View) -> Unit): Button = Button(context).apply {
        text = label
        isAllCaps = false
        textSize = 15f
        stateListAnimator = null
        minHeight = dp(48)
        minimumHeight = dp(48)
        minWidth = dp(64)
        setPadding(dp(16), 0, dp(16), 0)
        val (fill, ink, stroke) = when (tone) {
            Tone.PRIMARY -> Triple(R.color.accent, R.color.on_accent, null)
            Tone.DANGER -> Triple(R.color.surface, R.color.danger, R.color.outline)
            else -> Triple(R.color.surface, R.color.accent, R.color.outline)
        }
        val states = arrayOf(intArrayOf(-android.R.attr.state_enabled), intArrayOf())
        setTextColor(ColorStateList(states, intArrayOf(color(R.color.text_soft), color(ink))))
        background = ripple(shape(fill, 24, stroke))
        setOnClickListener(onClick)
    }

    /** Switch a button off, and show it. */
    fun enable(button: View, on: Boolean) {
        button.isEnabled = on
        button.alpha = if (on) 1f else 0.45f
    }

    fun ripple(content: Drawable): Drawable =
        RippleDrawable(ColorStateList.valueOf(color(R.color.chart_soft)), content, null)

    fun field(id: Int, label: Int, kind: Int = InputType.TYPE_CLASS_TEXT, lines: Int = 1): EditText = EditText(context).apply {
        this.id = id
        hint = context.getString(label)
        inputType = kind
        textSize = 15f
        minHeight = dp(48)
        setTextColor(color(R.color.text))
        setHintTextColor(color(R.color.text_soft))
        background = shape(R.color.background, 10, R.color.outline)
        setPadding(dp(12), dp(10), dp(12), dp(10))
        gravity = if (lines > 1) Gravity.TOP or Gravity.START else Gravity.CENTER_VERTICAL or Gravity.START
        textAlignment = View.TEXT_ALIGNMENT_VIEW_START
        if (lines > 1) {
            inputType = kind or InputType.TYPE_TEXT_FLAG_MULTI_LINE or InputType.TYPE_TEXT_FLAG_CAP_SENTENCES
            minLines = lines
            maxLines = 8
        }
    }

    /** A field with its name above it; a screen reader says the name, then what the field holds. */
    fun labelled(label: Int, field: View): LinearLayout =
        column(soft(context.getString(label)).apply { labelFor = field.id }, field, gap = 4)

    fun toggle(id: Int, label: Int, on: Boolean, onChange: (Boolean) -> Unit): Switch = Switch(context).apply {
        this.id = id
        text = context.getString(label)
        textSize = 15f
        setTextColor(color(R.color.text))
        minHeight = dp(48)
        isChecked = on
        setOnCheckedChangeListener { _, checked -> onChange(checked) }
    }

    /** A choice from a list, with a mark that it opens; [onChange] hears of a choice other than [selected]. */
    fun spinner(id: Int, items: List<String>, selected: Int, onChange: (() -> Unit)? = null): Spinner = Spinner(context).apply {
        this.id = id
        minimumHeight = dp(48)
        val mark = InsetDrawable(context.getDrawable(R.drawable.chevron), 0, 0, dp(8), 0)
        background = LayerDrawable(arrayOf(shape(R.color.background, 10, R.color.outline), mark)).apply {
            setLayerGravity(1, Gravity.CENTER_VERTICAL or Gravity.END)
        }
        setPadding(0, 0, dp(36), 0)
        adapter = object : ArrayAdapter<String>(context, android.R.layout.simple_spinner_dropdown_item, items) {
            override fun getView(position: Int, old: View?, parent: ViewGroup): View = text(items[position]).apply {
                gravity = Gravity.CENTER_VERTICAL or Gravity.START
                minHeight = dp(48)
                maxLines = 2
                setPadding(dp(12), 0, dp(4), 0)
            }
        }
        val first = selected.coerceIn(0, maxOf(0, items.size - 1))
        setSelection(first)
        onItemSelectedListener = object : AdapterView.OnItemSelectedListener {
            override fun onItemSelected(parent: AdapterView<*>?, view: View?, position: Int, id: Long) {
                if (position != first) onChange?.invoke()
            }

            override fun onNothingSelected(parent: AdapterView<*>?) = Unit
        }
    }

    /** A name and its value on one line. */
    fun fact(label: CharSequence, value: CharSequence): LinearLayout {
        val left = text(label, 14f, R.color.text_soft)
        val right = text(value, 14f).apply { textAlignment = View.TEXT_ALIGNMENT_VIEW_END }
        return row(left, right, stretched = setOf(right), gap = 16)
    }

    fun notice(value: CharSequence, tone: Tone = Tone.WARN): TextView {
        val (fill, ink) = when (tone) {
            Tone.DANGER -> R.color.danger_soft to R.color.danger
            Tone.WARN -> R.color.warn_soft to R.color.warn
            else -> R.color.accent_soft to R.color.text
        }
        return text(value, 14f, ink).apply {
            background = shape(fill, 10)
            setPadding(dp(12), dp(10), dp(12), dp(10))
            accessibilityLiveRegion = View.ACCESSIBILITY_LIVE_REGION_POLITE
        }
    }

    /** An error in the words of the one who raised it, with what was expected, received and what to try. */
    fun problem(error: OndeviceException): TextView {
        val lines = listOfNotNull(
            sentence(error.what),
            error.expected?.let { context.getString(R.string.expected, it) },
            error.received?.let { context.getString(R.string.received, it) },
            error.hint?.let { context.getString(R.string.hint, it) },
        )
        return notice(lines.joinToString("\n"), Tone.DANGER)
    }

    /** With a capital letter, unless it begins with a name such as `program.pte`. */
    private fun sentence(text: String): String =
        if (text.substringBefore(' ').all { it.isLetter() }) text.replaceFirstChar { it.uppercase() } else text

    /** What a screen shows when there is nothing to show yet. */
    fun empty(heading: Int, words: Int): LinearLayout = card(heading(context.getString(heading)), text(context.getString(words), 14f, R.color.text_soft))

    fun busy(words: CharSequence): LinearLayout {
        val bar = ProgressBar(context).apply {
            isIndeterminate = true
            indeterminateTintList = ColorStateList.valueOf(color(R.color.accent))
        }
        bar.layoutParams = ViewGroup.LayoutParams(dp(24), dp(24))
        val label = text(words, 14f).apply { accessibilityLiveRegion = View.ACCESSIBILITY_LIVE_REGION_POLITE }
        return row(bar, label, stretched = setOf(label), gap = 12).apply { bar.layoutParams.width = dp(24); bar.layoutParams.height = dp(24) }
    }
}

@Since(28)
object Heading28 {
    fun mark(view: View) {
        view.isAccessibilityHeading = true
    }
}
